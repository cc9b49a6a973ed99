"""transformers' Trainer within a budget, saved and resumed: `python examples/hosts_transformers.py`."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import lowtide

config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (48, 32))]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=8,
        logging_steps=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    for resume in (None, f"{folder}/checkpoint-2"):
        budget = lowtide.hosts.transformers.Budget("2300KiB", tune_s=0, time_limit_s=1)
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[budget])
        trainer.train(resume_from_checkpoint=resume)
        print(budget.handle.plan)
