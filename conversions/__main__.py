"""`python -m hf_sigmoid.conversions`, the same command as `hf-sigmoid`."""

import sys

from hf_sigmoid.command_line import main

if __name__ == "__main__":
    sys.exit(main())
