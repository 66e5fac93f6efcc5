"""Imported by workers through ``modules=``: notes what their process is like in ``$FACTS``."""

import json
import os
import random
import sys
from pathlib import Path

import numpy

if "FACTS" in os.environ:
    print(f"facts of {os.getpid()}\n", end="")
    Path(os.environ["FACTS"], f"{os.getpid()}.json").write_text(
        json.dumps(
            {
                "folder": os.getcwd(),
                "path": sys.path[0],
                "draws": [random.random(), numpy.random.random()],
                "leads its group": os.getpgrp() == os.getpid(),
                "descriptors": len(os.listdir("/proc/self/fd")),
            }
        )
    )
