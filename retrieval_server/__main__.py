"""``python -m retrieval_server``."""

import sys

from .serve import main

if __name__ == "__main__":
    sys.exit(main())
