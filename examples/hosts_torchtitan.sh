#!/usr/bin/env bash
# torchtitan's Llama 3 on 8 GPUs, each within 40 GiB: run it in a checkout of torchtitan, with lowtide installed.
# The override replaces the activation checkpointing that the config names. The batch size is the local one.
set -euo pipefail
torchrun --nproc_per_node 8 --module torchtitan.train \
    --module llama3 --config llama3_8b \
    --training.local_batch_size 2 --training.seq_len 8192 \
    --override.imports 'lowtide.hosts.torchtitan.budget={"budget": "40GiB", "batch_size": 2, "seq_len": 8192}'
