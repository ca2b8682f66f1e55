"""Run `equipoise` with the given arguments, and write its largest resident set to the error output, in bytes."""

import resource
import sys

from equipoise.__main__ import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Linux counts in KiB; processes that the command has started and awaited are among its children.
    largest = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(1024 * largest, file=sys.stderr)
    sys.exit(code)
