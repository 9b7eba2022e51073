"""Quantize a checkpoint once, with the server's own loader, so that servers load the result at every start."""

import sys
from pathlib import Path

# In the checkout and in the image, a parent folder holds the model repository, and that holds llama_engine.
_versions = (folder / "model_repository" / "llama" / "1" for folder in Path(__file__).resolve().parents)
sys.path += [str(version) for version in _versions if version.is_dir() and str(version) not in sys.path][:1]
