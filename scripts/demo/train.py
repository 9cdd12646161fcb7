"""Train the packaged demo model: a small Mixture-of-Experts language model, on a CPU, in about two hours.

    python scripts/demo/train.py --data DIR --out DIR [--steps N] [--seed 0] [--resume] [--eval-only]

The model is a standard Qwen3MoeForCausalLM (8 layers, 16 experts, 2 per token) with its own byte-level BPE
tokenizer. DIR must hold these five files (see corpus.FILES):

    TinyStories excerpts            CDLA-Sharing-1.0  Eldan and Li, 2023
    FairytaleQA stories             Apache-2.0        Xu et al., 2022
    33 public-domain children's books
    OpenAssistant English dialogues Apache-2.0        Koepf et al., 2023 (human-written part)
    Taskmaster-4 coffee dialogues   CC-BY-4.0         Google Research, 2024

Until the decay phase (the last quarter of --steps, two fifths with --start) nothing depends on --steps. A run
that was stopped there and resumed with another --steps therefore equals a run that was started with that one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from corpus import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END,
    EOT,
    MADE,
    SYSTEM,
    USER,
    VOCAB_SIZE,
    Corpus,
    chat_texts,
    load_corpus,
    train_tokenizer,
)
from first_weights import first_weights
from model_card import write_card
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

MUON_LR, ADAM_LR = 0.015, 3e-3
MUON_DECAY, ADAM_DECAY = 0.1, 0.01
BALANCE_COEF, Z_COEF = 0.004, 1e-4
SAVE_EVERY_S = 300
CHECKPOINT = "checkpoint.pt"
RUNS = "runs.json"  # the runs that made the weights beside it, for the card and for runs that continue
REPETITION_PENALTY = 1.0
# Share of the rows of a batch per stream, in the constant phase and in the decay phase. The decay phase
# leans to the wanted behaviour (short stories, chat); the earlier one takes more of the broader texts.
MIX = {
    "tinystories": (0.22, 0.25),
    "story_chat": (0.18, 0.33),
    "fairytales": (0.18, 0.12),
    "books": (0.28, 0.12),
    "coffee": (0.07, 0.08),
    "oasst": (0.06, 0.06),
    "small_talk": (0.01, 0.04),
}
# The same for a run that continues from weights (--start): the streams made by rule, and a part of everything
# else, so that nothing is forgotten. Dialogues around stories of TinyStories are left out at the end: their
# stories come to the asked topic late or not at all, and requests that name little were then not kept to.
START_MIX = {
    name: (share, share)
    for name, share in {
        "tinystories": 0.07,
        "story_chat": 0.0,
        "fairytales": 0.05,
        "books": 0.06,
        "coffee": 0.04,
        "oasst": 0.02,
        "small_talk": 0.02,
        "renamed_chat": 0.0,
        "made_stories": 0.48,
        "answers": 0.08,
        "tool_calls": 0.08,
        "json": 0.06,
        "copies": 0.04,
        "repeats": 0.0,
    }.items()
}
# For a short run that teaches the attention layers to look up and copy words; all else is frozen.
COPY_MIX = {
    name: (share, share)
    for name, share in {
        "tinystories": 0.04,
        "made_stories": 0.12,
        "tool_calls": 0.06,
        "json": 0.12,
        "copies": 0.31,
        "repeats": 0.35,
    }.items()
}
STREAMS = list(START_MIX)  # in the order of their random numbers: those of MIX first


@dataclass(frozen=True)
class RunShape:
    """What differs between a run from random weights and one that continues (--start).

    Attributes:
        mix: Share of the rows of a batch per stream, in the constant phase and in the decay phase.
        tokens_per_step: Tokens of a batch.
        warmup: Steps with a growing rate.
        rate: Factor of all learning rates.
        length: Tokens of a row in the constant phase.
        decay_length: The same in the decay phase; the full context of 1,024 trains its later positions.
        decay_share: Part of all steps that is the decay phase.
        attention_only: Experts and routers stay as they are.
    """

    mix: dict[str, tuple[float, float]]
    tokens_per_step: int
    warmup: int
    rate: float
    length: int = 512
    decay_length: int = 1024
    decay_share: float = 0.25
    attention_only: bool = False


FROM_NOTHING = RunShape(MIX, 10240, 60, 1.0)
FROM_WEIGHTS = RunShape(START_MIX, 5120, 20, 0.6, decay_length=512, decay_share=0.4)
TO_COPY = RunShape(COPY_MIX, 4096, 10, 1.0, length=256, attention_only=True)
LONG_TEXTS = ("fairytales", "books")


def model_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE_COEF,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        rope_theta=10000.0,
        initializer_range=0.04,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        use_cache=False,
    )


# ---------------------------------------------------------------------------------------------- fast kernels


class ExpertMLP(torch.autograd.Function):
    """All experts of a layer: rows sorted by expert, one GEMM per expert and matrix, own backward."""

    @staticmethod
    def forward(ctx, x: Tensor, w1: Tensor, w2: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        k = index.shape[1]
        order = torch.argsort(index.reshape(-1), stable=True)
        bounds = [0, *torch.bincount(index.reshape(-1), minlength=w1.shape[0]).cumsum(0).tolist()]
        rows = order // k
        xs = x.index_select(0, rows)
        scale = weight.reshape(-1).index_select(0, order).unsqueeze(1)
        hidden = x.new_empty(len(order), w1.shape[1])
        act = x.new_empty(len(order), w2.shape[2])
        ys = x.new_empty(len(order), x.shape[1])
        half = w2.shape[2]
        for e in range(w1.shape[0]):
            a, b = bounds[e], bounds[e + 1]
            if a < b:
                torch.mm(xs[a:b], w1[e].t(), out=hidden[a:b])
                torch.mul(functional.silu(hidden[a:b, :half]), hidden[a:b, half:], out=act[a:b])
                torch.mm(act[a:b], w2[e].t(), out=ys[a:b])
        ctx.save_for_backward(xs, w1, w2, rows, order, scale, hidden, act, ys)
        ctx.bounds, ctx.shape, ctx.k = bounds, x.shape, k
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return (ys * scale).index_select(0, back).view(x.shape[0], k, -1).sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        xs, w1, w2, rows, order, scale, hidden, act, ys = ctx.saved_tensors
        half = w2.shape[2]
        g = grad.index_select(0, rows)
        d_scale = (g * ys).sum(1)
        g *= scale
        frozen = not ctx.needs_input_grad[1]
        d_w1, d_w2 = (None, None) if frozen else (torch.zeros_like(w1), torch.zeros_like(w2))
        d_xs = torch.empty_like(xs)
        for e in range(w1.shape[0]):
            a, b = ctx.bounds[e], ctx.bounds[e + 1]
            if a < b:
                if not frozen:
                    torch.mm(g[a:b].t(), act[a:b], out=d_w2[e])
                d_act = g[a:b] @ w2[e]
                gate, up = hidden[a:b, :half], hidden[a:b, half:]
                sig = torch.sigmoid(gate)
                silu = gate * sig
                d_hidden = torch.empty_like(hidden[a:b])
                torch.mul(d_act, silu, out=d_hidden[:, half:])
                # d silu(z) = sig + silu * (1 - sig)
                torch.mul(d_act.mul_(up), sig.add_(silu * (1 - sig)), out=d_hidden[:, :half])
                if not frozen:
                    torch.mm(d_hidden.t(), xs[a:b], out=d_w1[e])
                torch.mm(d_hidden, w1[e], out=d_xs[a:b])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        d_x = d_xs.index_select(0, back).view(ctx.shape[0], ctx.k, -1).sum(1)
        return d_x, d_w1, d_w2, None, d_scale.index_select(0, back).view(ctx.shape[0], ctx.k)


def sorted_experts(module: nn.Module, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    return ExpertMLP.apply(x, module.gate_up_proj, module.down_proj, index, weight)


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of tied logits; forms the logits in chunks that fit the cache, gradients at once.

    Targets of -1 do not count.
    """

    @staticmethod
    def forward(ctx, h: Tensor, w: Tensor, target: Tensor) -> Tensor:
        d_h, d_w, total = torch.empty_like(h), torch.zeros_like(w), 0.0
        for a in range(0, len(h), 512):
            logits = h[a : a + 512] @ w.t()
            t = target[a : a + 512].unsqueeze(1)
            counts, t = (t >= 0).to(h.dtype), t.clamp(min=0)
            logits -= logits.amax(1, keepdim=True)
            shifted = logits.gather(1, t)
            p = logits.exp_()
            z = p.sum(1, keepdim=True)
            total += float(((z.log() - shifted) * counts).sum())
            p *= counts / z
            p.scatter_add_(1, t, -counts)
            torch.mm(p, w, out=d_h[a : a + 512])
            d_w.addmm_(p.t(), h[a : a + 512])
        size = max(1, int((target >= 0).sum()))
        ctx.save_for_backward(d_h.div_(size), d_w.div_(size))
        return h.new_tensor(total / size)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_h, d_w = ctx.saved_tensors
        return d_h * grad, d_w * grad, None


def balance_loss(router_logits: tuple[Tensor, ...], k: int) -> tuple[Tensor, Tensor]:
    """Switch-style balance loss and z-loss summed over layers, so that every layer is balanced by itself.

    Balancing is over a whole mixed batch: one kind of text may still prefer some experts.
    """
    total, shares = router_logits[0].new_zeros(()), []
    for logits in router_logits:
        logits = logits.view(-1, logits.shape[-1])
        n = logits.shape[-1]
        with torch.no_grad():
            picks = logits.topk(k, dim=-1).indices.reshape(-1)
            share = torch.bincount(picks, minlength=n) / len(picks)
            shares.append(share)
        total = total + BALANCE_COEF * n * (share * logits.softmax(-1).mean(0)).sum()
        total = total + Z_COEF * logits.logsumexp(-1).square().mean()
    return total, torch.stack(shares)


def keep_freed_memory() -> None:
    """Ask glibc not to return big blocks to the system: page faults cost a good part of a CPU step."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: every block comes from the heap
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: the heap keeps what is freed
    except (OSError, AttributeError):
        pass


# -------------------------------------------------------------------------------------------------- optimizer


class Muon:
    """Momentum, then the nearest orthogonal matrix (Newton-Schulz) as the update, per matrix of a stack."""

    # Quintic coefficients that shrink the error fastest over four steps (after "Polar Express", 2025).
    STEPS = (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    )

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.momentum = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for p, m in zip(self.params, self.momentum, strict=True):
            m.lerp_(p.grad, 0.05)
            update = torch.lerp(p.grad, m, 0.95)  # Nesterov
            if p.dim() == 3 and p.shape[1] > p.shape[2]:  # fused gate and up projection: two matrices
                update = update.view(2 * p.shape[0], p.shape[1] // 2, p.shape[2])
            scale = math.sqrt(max(1.0, update.shape[-2] / update.shape[-1]))
            p.mul_(1 - lr * MUON_DECAY).add_(self.orthogonal(update).view_as(p), alpha=-lr * scale)

    @classmethod
    def orthogonal(cls, g: Tensor) -> Tensor:
        x = g.mT if g.shape[-2] > g.shape[-1] else g
        x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
        for a, b, c in cls.STEPS:
            gram = x @ x.mT
            poly = b * gram + c * (gram @ gram)
            x = a * x + poly @ x
        return x.mT if g.shape[-2] > g.shape[-1] else x


# ------------------------------------------------------------------------------------------------------- data


class Streams:
    """Endless, deterministic rows of tokens per stream; the position is a count of rows drawn."""

    def __init__(self, corpus: Corpus, tok: PreTrainedTokenizerFast, seed: int, run: RunShape) -> None:
        self.corpus, self.tok, self.seed, self.run = corpus, tok, seed, run
        self.counts: dict[str, int] = {}
        self.cache: dict[str, tuple[int, list[np.ndarray]]] = {}

    def _encode(self, texts: list[str]) -> list[list[int]]:
        eot = self.tok.convert_tokens_to_ids(EOT)
        return [[*ids, eot] for ids in self.tok(texts, verbose=False)["input_ids"]]

    def _rows(self, name: str, epoch: int, length: int) -> list[np.ndarray]:
        rng = np.random.default_rng([self.seed, STREAMS.index(name), epoch, length])
        docs = self.corpus.train
        if name in ("tinystories", *LONG_TEXTS):
            texts = [d.text for d in docs[name]]
        else:
            texts = chat_texts(name, docs, rng)
        ids = self._encode(texts)
        ids = [ids[i] for i in rng.permutation(len(ids))]
        if name in LONG_TEXTS:
            flat = np.concatenate([np.asarray(i, dtype=np.int64) for i in ids])
            flat = flat[int(rng.integers(length)) :]
            return [flat[a : a + length + 1] for a in range(0, len(flat) - length, length)]
        # Short documents: every row starts with the start of a document, as every prompt does.
        rows, row = [], []
        for doc in ids:
            row += doc
            if len(row) > length:
                rows.append(np.asarray(row[: length + 1], dtype=np.int64))
                row = []
        return rows

    def _targets(self, name: str, row: np.ndarray) -> np.ndarray:
        """What is predicted at each place of a row: in texts made by rule nothing that the user or the system
        says, because it is drawn at random; -1 stands there.
        """
        if name not in MADE:
            return row[1:]
        end, answer = self.tok.convert_tokens_to_ids([EOT, ASSISTANT])
        marks = np.isin(row[:-1], self.tok.convert_tokens_to_ids([EOT, SYSTEM, USER, ASSISTANT]))
        last = np.maximum.accumulate(np.where(marks, np.arange(len(row) - 1), 0))
        return np.where(np.isin(row[last], [end, answer]), row[1:], -1)

    def draw(self, name: str, length: int) -> np.ndarray:
        """The next row; passes over a stream are numbered, each is shuffled and phrased anew."""
        key = f"{name}/{length}"
        epoch, at = divmod(self.counts.get(key, 0), 1_000_000)
        if key not in self.cache or self.cache[key][0] != epoch:
            self.cache[key] = (epoch, self._rows(name, epoch, length))
        rows = self.cache[key][1]
        row = rows[at]
        self.counts[key] = epoch * 1_000_000 + at + 1 if at + 1 < len(rows) else (epoch + 1) * 1_000_000
        return row

    def batch(self, step: int, length: int, decay: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``[rows, length]`` of a step."""
        share = np.array([self.run.mix.get(s, (0.0, 0.0))[decay] for s in STREAMS])
        rows = self.run.tokens_per_step // length
        # Systematic sampling: the counts of a batch differ from the wanted shares by less than one row.
        start = np.random.default_rng([self.seed, 999, step]).random()
        picks = np.searchsorted(np.cumsum(share / share.sum()), (np.arange(rows) + start) / rows)
        drawn = [(STREAMS[i], self.draw(STREAMS[i], length)) for i in picks]
        targets = np.stack([self._targets(name, row) for name, row in drawn])
        return torch.from_numpy(np.stack([row[:-1] for _, row in drawn])), torch.from_numpy(targets)

    def passes(self) -> dict[str, float]:
        """How often each stream has been gone through, both row lengths added up."""
        done = dict.fromkeys(STREAMS, 0.0)
        for key, count in self.counts.items():
            name, length = key.split("/")
            epoch, at = divmod(count, 1_000_000)
            done[name] += epoch + at / len(self._rows(name, epoch, int(length)))
        return done


# --------------------------------------------------------------------------------------------------- training


def decay_start(steps: int, run: RunShape) -> int:
    return steps - round(run.decay_share * steps)


def lr_factor(step: int, steps: int, run: RunShape) -> float:
    start = decay_start(steps, run)
    return (
        run.rate
        * min(1.0, (step + 1) / run.warmup)
        * (1.0 if step < start else (steps - step) / (steps - start))
    )


def new_model() -> Qwen3MoeForCausalLM:
    ALL_EXPERTS_FUNCTIONS.register("sorted", sorted_experts)
    model = Qwen3MoeForCausalLM._from_config(
        model_config(), attn_implementation="sdpa", experts_implementation="sorted"
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj")):
                p.mul_(0.25)  # 1/sqrt(2 x layers): keeps the residual stream from growing at the start
    return model


def load_state(
    out: Path, model: Qwen3MoeForCausalLM, streams: Streams, restore: Callable[[dict], None] | None = None
) -> dict:
    saved = torch.load(out / CHECKPOINT, weights_only=True)
    model.load_state_dict(saved["model"])
    streams.counts = saved["counts"]
    if restore:
        restore(saved)
    return saved["log"]


def train(args: argparse.Namespace, model: Qwen3MoeForCausalLM, streams: Streams) -> dict:
    if streams.run.attention_only:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".mlp." not in name)
    muon_params = [
        p
        for n, p in model.named_parameters()
        if p.requires_grad and p.dim() >= 2 and "embed" not in n and "mlp.gate." not in n
    ]
    chosen = {id(p) for p in muon_params}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    muon = Muon(muon_params)
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.dim() >= 2], "weight_decay": ADAM_DECAY},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=ADAM_LR,
        betas=(0.9, 0.95),
        eps=1e-10,
    )
    path, decay_from = args.out / CHECKPOINT, decay_start(args.steps, streams.run)
    log = {"step": 0, "tokens": 0, "seconds": 0.0}
    if args.resume and path.exists():

        def restore(saved: dict) -> None:
            adam.load_state_dict(saved["adam"])
            muon.momentum = saved["muon"]

        log = load_state(args.out, model, streams, restore)
        if log["decay_from"] != decay_from and log["step"] > min(decay_from, log["decay_from"]):
            raise SystemExit(
                "error: the checkpoint is already in the decay phase of this or of its own --steps"
            )
        print(f"resumed at step {log['step']}", flush=True)
    log["decay_from"] = decay_from

    def save() -> None:
        state = {"log": log, "model": model.state_dict(), "adam": adam.state_dict(), "muon": muon.momentum}
        torch.save({**state, "counts": streams.counts}, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    stop: list[int] = []
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda number, frame: stop.append(number))
    embed, last_save = model.get_input_embeddings().weight, time.monotonic()
    model.train()
    while log["step"] < args.steps and not stop:
        begin, step = time.monotonic(), log["step"]
        decay = step >= decay_from
        rows, targets = streams.batch(step, streams.run.decay_length if decay else streams.run.length, decay)
        out = model.model(input_ids=rows, output_router_logits=True)
        loss = ChunkedLoss.apply(out.last_hidden_state.flatten(0, 1), embed, targets.reshape(-1))
        aux, shares = balance_loss(out.router_logits, model.config.num_experts_per_tok)
        (loss + aux).backward()
        norm = nn.utils.clip_grad_norm_(rest, 1.0)
        factor = lr_factor(step, args.steps, streams.run)
        muon.step(MUON_LR * factor)
        for group in adam.param_groups:
            group["lr"] = ADAM_LR * factor
        adam.step()
        model.zero_grad(set_to_none=True)
        seconds = time.monotonic() - begin
        log["step"] += 1
        batch = streams.run.tokens_per_step
        log["tokens"] += batch
        log["seconds"] += seconds
        if step % 10 == 9 or step < 10:
            print(
                f"{time.strftime('%H:%M:%S')} step {step + 1} loss {loss.item():.4f} norm {norm:.2f} "
                f"lr {factor:.3f} share {shares.min():.2%}-{shares.max():.2%} "
                f"{batch / seconds:.0f} tok/s mean {log['tokens'] / log['seconds']:.0f}",
                flush=True,
            )
        if time.monotonic() - last_save > SAVE_EVERY_S:
            save()
            last_save = time.monotonic()
    save()
    if stop:
        print(f"stopped at step {log['step']}", flush=True)
        sys.exit(0)
    return log


# -------------------------------------------------------------------------------------------- saving and card


def save_model(out: Path, model: Qwen3MoeForCausalLM, tok: PreTrainedTokenizerFast) -> None:
    model.config.use_cache = True
    model.generation_config = GenerationConfig(
        bos_token_id=tok.convert_tokens_to_ids(EOT),
        eos_token_id=tok.convert_tokens_to_ids([END, EOT]),
        pad_token_id=tok.convert_tokens_to_ids(EOT),
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        repetition_penalty=REPETITION_PENALTY,
    )
    model.to(torch.bfloat16).save_pretrained(out)


def earlier_runs(start: Path) -> list[dict]:
    """The runs that made the weights in START. Those of the packaged store stand beside this file."""
    found = start / RUNS
    return json.loads((found if found.exists() else Path(__file__).with_name(RUNS)).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the moechat demo model on a CPU.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the five corpus files")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, model and card")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--start", type=Path, help="continue from the weights of this checkpoint or block store"
    )
    parser.add_argument("--copies", action="store_true", help="train the attention layers to copy words")
    parser.add_argument("--rate", type=float, help="factor of all learning rates, instead of the run's own")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from OUT/checkpoint.pt")
    parser.add_argument(
        "--eval-only", action="store_true", help="save and measure OUT/checkpoint.pt as it is"
    )
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(args.data)
    shape = TO_COPY if args.copies else FROM_WEIGHTS if args.start else FROM_NOTHING
    if args.rate is not None:
        shape = replace(shape, rate=args.rate)
    go_on = (args.resume or args.eval_only) and (args.out / "tokenizer.json").exists()
    if go_on or args.start:
        tok = AutoTokenizer.from_pretrained(args.out if go_on else args.start)
        tok.chat_template = CHAT_TEMPLATE
    else:
        tok = train_tokenizer(corpus)
    tok.save_pretrained(args.out)
    model, streams = new_model(), Streams(corpus, tok, args.seed, shape)
    if args.start:
        model.load_state_dict(first_weights(args.start), strict=False)
        model.tie_weights()
    log = load_state(args.out, model, streams) if args.eval_only else train(args, model, streams)
    save_model(args.out, model, tok)
    options = ["--copies"] if args.copies else []
    options += [] if args.rate is None else [f"--rate {args.rate:g}"]
    options += [f"--steps {args.steps}", f"--seed {args.seed}"]
    run = {
        "command": " ".join([*options, f"--threads {args.threads}"]),
        "steps": log["step"],
        "tokens": log["tokens"],
        "rate": shape.rate,
        "tokens_per_step": shape.tokens_per_step,
        "attention_only": shape.attention_only,
        "hours": log["seconds"] / 3600,
        "tokens_per_second": log["tokens"] / log["seconds"],
        "threads": args.threads,
        "warmup": shape.warmup,
        "decay_length": shape.decay_length,
        "decay_steps": max(0, log["step"] - log["decay_from"]),
        "passes": streams.passes(),
    }
    runs = [*(earlier_runs(args.start) if args.start else []), run]
    (args.out / RUNS).write_text(json.dumps(runs, indent=1) + "\n")
    write_card(args.out, corpus, {"runs": runs, "balance_coef": BALANCE_COEF})


if __name__ == "__main__":
    main()
