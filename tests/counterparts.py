"""Runs the counterparts named on the command line in one process, and writes what each returned or raised as JSON: TensorFlow is imported once."""

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any


def outcome(name: str) -> dict[str, Any]:
    try:
        return {"value": importlib.import_module(name).main()}
    except Exception:
        return {"raised": traceback.format_exc()}


if __name__ == "__main__":
    into, *names = sys.argv[1:]
    Path(into).write_text(json.dumps({name: outcome(name) for name in names}))
