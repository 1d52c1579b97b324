"""GSM8K as our packed rows: encoded by our template, packed as a whole, in an order drawn once."""

from pathlib import Path

import numpy as np
from train_settings import ROW_LENGTH, conversations

from twinkle_core.packing.best_fit_decreasing import pack
from twinkle_core.template import Template
from twinkle_core.types import Message, PackedRow, Trajectory


def packed_rows(file: Path, folder: Path) -> list[PackedRow]:
    """Without the last rows opened, which are not full."""
    template = Template(folder, max_length=ROW_LENGTH)
    chats = [Trajectory(messages=[Message(**message) for message in row["messages"]]) for row in conversations(str(file))]
    samples = template.batch_encode(chats)
    bins = list(pack(np.array([len(sample.input_ids) for sample in samples]), ROW_LENGTH))
    made = [
        PackedRow(
            input_ids=np.concatenate([samples[at].input_ids for at in row]),
            labels=np.concatenate([samples[at].labels for at in row]),
            seq_lens=np.array([len(samples[at].input_ids) for at in row], dtype=np.int32),
            sample_ids=np.array(row, dtype=np.int64),
        )
        for row in bins
    ]
    full = [row for row in made if len(row.input_ids) > 0.9 * ROW_LENGTH]
    return [full[at] for at in np.random.default_rng(0).permutation(len(full))]
