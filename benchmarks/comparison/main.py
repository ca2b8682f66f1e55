"""Strategies compared for a model whose outputs are larger than its weights; see README.md."""

import sys
from pathlib import Path

from equipoise.__main__ import main

if __name__ == "__main__":
    conf = Path(__file__).with_name("conf")
    sys.exit(main(["compare", "--config-dir", str(conf), "trainer.devices=[cpu,cpu]", *sys.argv[1:]]))
