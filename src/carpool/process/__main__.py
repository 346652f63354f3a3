"""`python -m carpool.process FD ASKED`: a worker, on these two sockets. Started by a supervisor, not by hand."""

import sys

from carpool.process.worker import main

sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
