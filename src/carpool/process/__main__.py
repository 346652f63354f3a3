"""`python -m carpool.process FD`: a worker, on the socket FD. Started by a supervisor, not by hand."""

import sys

from carpool.process.worker import main

sys.exit(main(int(sys.argv[1])))
