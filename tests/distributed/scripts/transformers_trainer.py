"""A Transformers Trainer with a model from a config: nothing is downloaded."""
# mypy: ignore-errors

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"input_ids": torch.full((8,), index % 10), "labels": torch.tensor(index % 2)}


def main():
    config = BertConfig(
        vocab_size=10,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=2,
        per_device_train_batch_size=4,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=Sentences(),
    )
    trainer.train()
    print(f"trained: rank {arguments.process_index} of {arguments.world_size}")


if __name__ == "__main__":
    main()
