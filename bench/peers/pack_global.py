"""Our packer over all lengths, rows assigned. Arguments: LENGTHS.npy CAPACITY [WINDOW]."""

import sys
from typing import Any

import numpy as np
from answer import serve

from twinkle_core.packing import pack, pack_windows


def main() -> None:
    lengths, capacity = np.load(sys.argv[1]), int(sys.argv[2])
    window = int(sys.argv[3]) if len(sys.argv) > 3 else None

    def work() -> dict[str, Any]:
        if window is None:
            return {"bins": len(pack(lengths, capacity))}
        return {"bins": sum(map(len, pack_windows(lengths, capacity, window)))}

    serve(work)


if __name__ == "__main__":
    main()
