"""One recipe a file: how a dataset becomes an adapter, with TRL's trainers and PEFT."""
