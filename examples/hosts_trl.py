"""TRL's SFTTrainer with a LoRA adapter of PEFT, within a budget: `python examples/hosts_trl.py`."""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import lowtide

words = {"<pad>": 0, "<eos>": 1, **{f"w{n}": n for n in range(2, 64)}}
inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
texts = [" ".join(f"w{n}" for n in row.tolist()) for row in torch.randint(2, 64, (32, 24))]
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=1,
        pad_token_id=0,
    )
)

budget = lowtide.hosts.transformers.Budget("40MiB", probe=4, tune_s=0, time_limit_s=1)
with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            folder,
            gradient_checkpointing=False,  # the default is True, which the callback would take over with a message
            max_steps=3,
            per_device_train_batch_size=8,
            max_length=32,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[budget],
    )
    trainer.train()
print(budget.handle.plan)
