"""GPT-2 and a vision transformer of Hugging Face, fine-tuned with privacy and without, whole and by LoRA, in shards.

    python -m benchmarks.finetuning --nproc 2 --shard fsdp2

Both are first trained on public inputs, without privacy, and kept in --out. Then PrivateTrainer fine-tunes them on
private ones, and Trainer does so with the same arguments, to compare. docs/integrations.md has the table.
"""
