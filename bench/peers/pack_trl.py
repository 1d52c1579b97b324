"""TRL's best-fit-decreasing packer, with tokens of one byte. Arguments: LENGTHS.npy CAPACITY BATCH (0: all in one)."""

import sys
from typing import Any

import numpy as np
from answer import serve


def main() -> None:
    import pyarrow as pa
    from trl.data_utils import _pack_bfd

    lengths, capacity, batch = np.load(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], dtype=np.int8)))
    table = pa.table({"input_ids": rows})
    size = batch or len(lengths)

    def work() -> dict[str, Any]:
        return {"bins": sum(len(_pack_bfd(table.slice(start, size), capacity)) for start in range(0, len(lengths), size))}

    serve(work)


if __name__ == "__main__":
    main()
