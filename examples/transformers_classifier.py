"""Train a classifier from transformers on generated praise and complaints, without downloads.

    python examples/transformers_classifier.py                       one process, about 10 s
    headway launch --cpu --num-processes 2 examples/transformers_classifier.py

The model is a small BERT, created from a configuration, and each word is a token. Needs the extra
`examples`: pip install "headway[examples]".
"""

import random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from headway import Accelerator
from headway.utils import set_seed

SUBJECTS = ["the film", "the book", "this meal", "our stay", "my flight", "the concert"]
PRAISE = ["wonderful", "superb", "delightful", "charming", "excellent"]
COMPLAINTS = ["dreadful", "boring", "disappointing", "tedious", "awful"]
LINKS = ["was", "seemed", "turned out", "felt"]
PADDING, NOT = "[PAD]", "not"
WORDS = [PADDING, NOT, *" ".join([*SUBJECTS, *LINKS, *PRAISE, *COMPLAINTS]).split()]
VOCABULARY = {word: token for token, word in enumerate(dict.fromkeys(WORDS))}

NUM_TEST_SAMPLES = 211  # a prime, so several ranks cannot divide it evenly
SAMPLES_PER_STEP = 32  # over all ranks
EPOCHS = 4


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(split_batches=True)  # batch_size is the total over all ranks
    train_set, test_set = Sentences(1_000, seed=0), Sentences(NUM_TEST_SAMPLES, seed=1)
    train_loader = DataLoader(train_set, SAMPLES_PER_STEP, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(test_set, batch_size=64, collate_fn=collate)
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=VOCABULARY[PADDING],
        hidden_dropout_prob=0.0,  # ranks would draw different dropout masks
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    num_steps = EPOCHS * len(train_loader)  # optimizer steps, on any number of ranks
    scheduler = get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )
    for epoch in range(EPOCHS):
        model.train()
        for batch in train_loader:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        num_correct, num_samples = evaluate(accelerator, model, test_loader)
        accelerator.print(
            f"epoch {epoch}: test accuracy {num_correct / num_samples:.4f} "
            f"({num_correct} of {num_samples})"
        )
    accelerator.end_training()


class Sentences(Dataset[tuple[str, int]]):
    """Generated sentences, labelled 1 for praise and 0 for a complaint."""

    def __init__(self, num_samples: int, seed: int) -> None:
        draw = random.Random(seed)
        self.samples = [generate_sample(draw) for _ in range(num_samples)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.samples[index]


def generate_sample(draw: random.Random) -> tuple[str, int]:
    is_good, is_negated = draw.random() < 0.5, draw.random() < 0.5
    words = [draw.choice(SUBJECTS), draw.choice(LINKS), NOT if is_negated else ""]
    words.append(draw.choice(PRAISE if is_good else COMPLAINTS))
    return " ".join(filter(None, words)), int(is_good != is_negated)


def collate(samples: list[tuple[str, int]]) -> dict[str, Tensor]:
    """Return input_ids and attention_mask, both [samples, longest], and labels [samples]."""
    rows = [torch.tensor([VOCABULARY[word] for word in text.split()]) for text, _ in samples]
    padding = VOCABULARY[PADDING]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    labels = torch.tensor([label for _, label in samples])
    mask = (input_ids != padding).long()
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: Any, loader: Any) -> tuple[int, int]:
    """Return the number of correct test samples and of all test samples, over all ranks."""
    model.eval()
    num_correct = num_samples = 0
    for batch in loader:
        predictions = model(**batch).logits.argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
        num_correct += int((predictions == labels).sum())
        num_samples += len(labels)
    return num_correct, num_samples


if __name__ == "__main__":
    main()
