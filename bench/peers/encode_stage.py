"""Our encode stage as the pipeline runs it: tokenizer loaded, processes started, Arrow files written.

Arguments: FOLDER (with train.jsonl and held_out.jsonl) MODEL_FOLDER MAX_LENGTH.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from answer import serve

from tasks.settings import QUIET
from twinkle_core.config import TemplateConfig
from twinkle_core.template import Template, encode
from twinkle_core.types import NoProgress


def main() -> None:
    folder, model, max_length = sys.argv[1:]
    os.environ.update(QUIET)  # as every process of the pipeline
    Template(model)  # imports what loading one takes

    def work() -> dict[str, Any]:
        began = time.perf_counter()
        template = Template(model, TemplateConfig(max_length=int(max_length)))
        loaded = time.perf_counter()
        with tempfile.TemporaryDirectory() as out:
            report = encode(Path(folder), template, Path(out), NoProgress())["train"]
            ended = time.perf_counter()
        facts = {"seconds": ended - began, "load_seconds": loaded - began}
        return facts | {"rows": report["conversations"], "tokens": report["tokens"], "supervised": report["supervised_tokens"]}

    serve(work)


if __name__ == "__main__":
    main()
