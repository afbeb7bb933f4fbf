"""`python -m tests.soak`: see `soak.py`."""

import sys

from tests.distributed.harness import start_server, stop_server

if __name__ == "__main__":
    # Before torch starts threads.
    start_server()
    from tests.soak.soak import main

    try:
        status = min(main(sys.argv[1:]), 1)
    finally:
        stop_server()
    sys.exit(status)
