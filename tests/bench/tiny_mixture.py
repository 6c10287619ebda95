#!/usr/bin/env python3
"""Trains a small mixture of experts (Qwen3-MoE, 11 M parameters, 16 experts of which a token takes
2), so that there is one to measure accuracy on: 1200 steps of 2048 tokens, on a GPU if there is
one, else a quarter of an hour on two cores. Needs torch, transformers and tokenizers.

usage: tiny_mixture.py OUT TOKENIZER_DIR TEXT...
"""
import pathlib
import shutil
import sys

import torch
import transformers
from tokenizers import Tokenizer

STEPS, BATCH, LENGTH, RATE = 1200, 8, 256, 2e-3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    out, tokenizer, *texts = map(pathlib.Path, sys.argv[1:])
    torch.manual_seed(1)
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids = torch.tensor([i for text in texts for part in text.read_text().split("\n\n")
                        for i in encoder.encode(part + "\n\n", add_special_tokens=False).ids])
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(
        "qwen3_moe", vocab_size=encoder.get_vocab_size(), hidden_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, moe_intermediate_size=192,
        num_experts=16, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=2048,
        tie_word_embeddings=True, pad_token_id=None, bos_token_id=0, eos_token_id=1,
        output_router_logits=True, router_aux_loss_coef=0.01)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 50) * max(0.02, 1 - step / STEPS))
    for step in range(STEPS):
        starts = torch.randint(0, len(ids) - LENGTH, (BATCH,))
        batch = torch.stack([ids[s:s + LENGTH] for s in starts]).to(DEVICE)
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.config.output_router_logits = False
    model.half().save_pretrained(out)
    for file in tokenizer.glob("tokenizer*.json"):
        shutil.copy(file, out)


if __name__ == "__main__":
    main()
