"""twinkle-kit's Dataset.encode. Arguments: FILE.jsonl MODEL_FOLDER MAX_LENGTH NUM_PROC [ROWS]."""

import json
import sys
import time
from itertools import islice
from typing import Any

from answer import cpu_seconds, serve


def main() -> None:
    import datasets
    import twinkle
    from twinkle.dataset import Dataset, DatasetMeta

    file, model, max_length, num_proc, *limit = sys.argv[1:]
    datasets.disable_caching()
    datasets.disable_progress_bars()
    twinkle.initialize(mode="local")
    with open(file, encoding="utf-8") as lines:
        wanted = islice(lines, int(limit[0]) if limit else None)
        rows = datasets.Dataset.from_list([{"messages": json.loads(line)["messages"]} for line in wanted])

    def work() -> dict[str, Any]:
        dataset = Dataset(DatasetMeta(data=rows))
        began, cpu_began = time.perf_counter(), cpu_seconds()
        dataset.set_template("Template", model_id=model, max_length=int(max_length))
        dataset.encode(**({} if num_proc == "1" else {"num_proc": int(num_proc)}))
        spent = {"seconds": time.perf_counter() - began, "cpu_seconds": cpu_seconds() - cpu_began}
        tokens = sum(len(ids) for ids in dataset.dataset["input_ids"])
        supervised = sum(sum(label != -100 for label in labels) for labels in dataset.dataset["labels"])
        return {**spent, "rows": len(dataset), "tokens": tokens, "supervised": supervised}

    serve(work)


if __name__ == "__main__":
    main()
