"""The embedded engine against Hugging Face's `generate`: one JSON line. See `evals.engine_speed`.

python benchmarks/engine_vs_hf.py --model FOLDER
"""

from evals.engine_speed import main

if __name__ == "__main__":
    main()
