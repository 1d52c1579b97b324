"""twinkle-kit's way of packing: binpacking over windows of 1000, the last bin carried on. Arguments: LENGTHS.npy CAPACITY."""

import sys
from typing import Any

import numpy as np
from answer import serve

WINDOW = 1000


def main() -> None:
    from twinkle.dataset.packing_dataset import PackingDataset

    lengths, capacity = np.load(sys.argv[1]).tolist(), int(sys.argv[2])

    def work() -> dict[str, Any]:
        bins, held = 0, []
        for start in range(0, len(lengths), WINDOW):
            held += list(enumerate(lengths[start : start + WINDOW], start))
            ended = start + WINDOW >= len(lengths)
            full, held = PackingDataset._calculate_matched_group(held, capacity, is_finished=ended)
            bins += len(full)
        return {"bins": bins}

    serve(work)


if __name__ == "__main__":
    main()
