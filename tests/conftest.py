"""Settings that must stand before verl or torch is imported by any test."""

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
