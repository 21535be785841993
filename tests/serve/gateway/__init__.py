"""The gateway through its public face, with the official client, against a scripted worker."""
