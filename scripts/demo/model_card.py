"""Held-out measures, samples and the model card of the demo model (used by train.py).

Every figure on the card is measured here or taken from the training log; none is typed in by hand.
"""

from __future__ import annotations

import json
import math
import platform
import textwrap
from pathlib import Path

import numpy as np
import torch
import transformers
from corpus import EOT, HELD_OUT_ONE_IN, Corpus, Doc, render, story_chat
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3MoeForCausalLM,
    set_seed,
)

PLAIN_PROMPTS = [
    "Once upon a time",
    "One day, a little girl named Lucy found",
    "Tom had a big red ball.",
    "There was once a king who had three sons",
    "The old bear lived in a forest.",
]
CHAT_PROMPTS = [
    "Tell me a story about a fox named Mia and a red kite.",
    "Write a short story about a dog and a boat.",
    "Hi! Who are you?",
    "What does --vram do?",
    'Anna the owl found a blue cup. Answer as JSON: {"name": ..., "animal": ..., "object": ...}',
    "Can I get a large latte with oat milk, please?",
    "How can I sleep better at night?",
]
TOOL_PROMPT = "What is the weather like in Lisbon?"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SOURCES = {
    "tinystories": (
        "TinyStories (V1) excerpts",
        "CDLA-Sharing-1.0",
        "R. Eldan and Y. Li, TinyStories, 2023; excerpts as carried by s-ajaykumar/smallGPT and "
        "yuninxia/moe-routing-bench on GitHub",
    ),
    "fairytales": (
        "FairytaleQA, the story texts",
        "Apache-2.0 (texts in the public domain)",
        "Y. Xu et al., FairytaleQA, 2022; uci-soe/FairytaleQAData on GitHub",
    ),
    "books": (
        "children's books, listed below",
        "public domain in the US",
        "mlschmitt/classic-books-markdown and teropa/nlp on GitHub",
    ),
    "coffee": (
        "Taskmaster-4 coffee orders",
        "CC-BY-4.0",
        "Google Research, Taskmaster-4, 2024; google-research-datasets/Taskmaster on GitHub; changed: "
        "API annotations dropped, punctuation straightened",
    ),
    "oasst": (
        "OpenAssistant English dialogues, human-written, without code",
        "Apache-2.0",
        "A. Koepf et al., OpenAssistant Conversations, 2023; LAION-AI/Open-Assistant on GitHub",
    ),
}
BOOKS = (
    "Abbie Farwell Brown, The Christmas Angel; Aesop, Aesop's Fables; Anna Sewell, Black Beauty; "
    "Beatrix Potter, Great Big Treasury of Beatrix Potter; Carlo Collodi, The Adventures of Pinocchio; "
    "Edith Nesbit, Five Children and It, The Book of Dragons, The Railway Children; Frances Hodgson "
    "Burnett, A Little Princess, The Secret Garden; George MacDonald, The Princess and the Goblin; Hans"
    " Christian Andersen, Andersen's Fairy Tales, The Little Mermaid; Hugh Lofting, The Story of Doctor"
    " Dolittle; J. M. Barrie, Peter Pan; Johanna Spyri, Heidi; Kenneth Grahame, The Wind in the "
    "Willows; L. Frank Baum, A Kidnapped Santa Claus, Dorothy and the Wizard in Oz, Ozma of Oz, The "
    "Life and Adventures of Santa Claus, The Marvelous Land of Oz, The Wonderful Wizard of Oz; Lewis "
    "Carroll, Alice's Adventures in Wonderland, Through the Looking-Glass; Louisa May Alcott, Little "
    "Men; Lucy Maud Montgomery, Anne of Green Gables; Mark Twain, The Adventures of Tom Sawyer, The "
    "Prince and the Pauper; Oscar Wilde, The Happy Prince and Other Tales; Rudyard Kipling, The Jungle "
    "Book; Thornton W. Burgess, The Adventures of Buster Bear; Sara Cone Bryant, Stories to Tell to "
    "Children"
)


def held_out_texts(corpus: Corpus) -> dict[str, list[str]]:
    def text(doc: Doc) -> str:
        return render(doc.turns) if doc.turns else doc.text

    texts = {s: [text(d) for d in docs] for s, docs in corpus.held_out.items()}
    rng = np.random.default_rng(0)
    texts["story_chat"] = [render(story_chat(d, rng)) for d in corpus.held_out["tinystories"]]
    return texts


@torch.inference_mode()
def measure(model: Qwen3MoeForCausalLM, tok: PreTrainedTokenizerFast, corpus: Corpus) -> dict:
    """Held-out loss and expert usage per source."""
    layers, experts = model.config.num_hidden_layers, model.config.num_experts
    k, window = model.config.num_experts_per_tok, model.config.max_position_embeddings
    result = {}
    for source, texts in held_out_texts(corpus).items():
        nll, scored, reuse, pairs = 0.0, 0, np.zeros(layers), 0
        counts = torch.zeros(layers, experts, dtype=torch.long)
        for text in texts:
            ids = torch.tensor(tok(EOT + text, verbose=False)["input_ids"])
            for start in range(0, len(ids) - 1, window):
                piece = ids[start : start + window + 1]
                out = model(input_ids=piece[None, :-1], output_router_logits=True, use_cache=False)
                nll += functional.cross_entropy(out.logits[0], piece[1:], reduction="sum").item()
                scored += len(piece) - 1
                pairs += len(piece) - 2
                for layer, logits in enumerate(out.router_logits):
                    used = functional.one_hot(logits.view(-1, experts).topk(k).indices, experts).sum(1)
                    counts[layer] += used.sum(0)
                    reuse[layer] += (used[1:] * used[:-1]).sum().item() / k
        size = sum(
            len(tok.decode(tok(t, verbose=False)["input_ids"], skip_special_tokens=True).encode())
            for t in texts
        )
        result[source] = {
            "documents": len(texts),
            "tokens": scored,
            "bytes": size,
            "perplexity_per_token": math.exp(nll / scored),
            "bits_per_byte": nll / math.log(2) / size,
            "expert_counts": counts.tolist(),
            "same_expert_as_previous_token": (reuse / pairs).tolist(),
        }
    return result


def usage_summary(sources: dict) -> dict:
    """Shares per layer with every source weighing the same, and how far each source is from that mean."""
    share = {s: np.array(r["expert_counts"]) / np.sum(r["expert_counts"][0]) for s, r in sources.items()}
    mean = np.mean(list(share.values()), axis=0)
    entropy = -(mean * np.log(np.maximum(mean, 1e-12))).sum(1) / math.log(mean.shape[1])
    return {
        "mean_share": mean.tolist(),
        "layers": [
            {"layer": i, "min": m.min(), "max": m.max(), "entropy": e}
            for i, (m, e) in enumerate(zip(mean, entropy, strict=True))
        ],
        # Total variation distance: the part of a source's expert picks that would have to move.
        "distance_from_mean": {s: (np.abs(p - mean).sum(1) / 2).tolist() for s, p in share.items()},
        "favourites": {s: (p / np.maximum(mean, 1e-9)).argmax(1).tolist() for s, p in share.items()},
        "lowest_share": mean.min(),
        "highest_share": mean.max(),
    }


@torch.inference_mode()
def samples(model: Qwen3MoeForCausalLM, tok: PreTrainedTokenizerFast) -> list[dict]:
    found = []
    for kind, prompts in (("plain", PLAIN_PROMPTS), ("chat", CHAT_PROMPTS), ("tool", [TOOL_PROMPT])):
        for prompt in prompts:
            text = prompt
            if kind != "plain":
                turn = [{"role": "user", "content": prompt}]
                text = tok.apply_chat_template(
                    turn,
                    tools=[TOOL] if kind == "tool" else None,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            ids = tok(text, return_tensors="pt")["input_ids"]
            set_seed(len(found))
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=220, use_cache=True)
            answer = tok.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            found.append({"kind": kind, "prompt": prompt, "output": answer})
    return found


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _table(head: list[str], rows: list[list]) -> str:
    return "\n".join("| " + " | ".join(map(str, r)) + " |" for r in [head, ["---"] * len(head), *rows])


def _run_text(number: int, run: dict) -> str:
    """One item of the list of runs."""
    passes = ", ".join(f"{name} {n:.1f}" for name, n in run["passes"].items() if n)
    what = "attention layers, embedding and norms alone" if run["attention_only"] else "all weights"
    length = run.get("decay_length", 1024)
    decay = (
        f"then linear decay to zero over the last {run['decay_steps']:,} steps, in rows of {length:,} tokens"
        if run["decay_steps"]
        else "no decay"
    )
    threads = f"{run['threads']} thread{'s' * (run['threads'] > 1)}"
    return (
        f"{number}. `train.py {run['command']}`: {run['steps']:,} steps of {run['tokens_per_step']:,} "
        f"tokens, {run['tokens']:,} tokens in all; {what}; {run['hours']:.2f} hours on {threads} "
        f"({run['tokens_per_second']:,.0f} tokens per second); learning rates times "
        f"{run['rate']:g}; {run['warmup']} warm-up steps, a constant rate, {decay}. {run.get('note', '')} "
        f"Passes over each stream: {passes}."
    )


def card(facts: dict) -> str:
    c, run, held, usage = facts["config"], facts["training"], facts["held_out"], facts["usage"]
    gen = facts["generation"]
    even, chance = 1 / c["experts"], c["top_k"] / c["experts"]
    licences = _table(
        ["source", "what", "licence", "from"],
        [[s, what, licence, where] for s, (what, licence, where) in SOURCES.items()],
    )
    quality = _table(
        ["source", "documents", "tokens", "perplexity per token", "bits per byte"],
        [
            [
                s,
                r["documents"],
                f"{r['tokens']:,}",
                f"{r['perplexity_per_token']:.2f}",
                f"{r['bits_per_byte']:.3f}",
            ]
            for s, r in held.items()
        ],
    )
    repeat = np.mean([r["same_expert_as_previous_token"] for r in held.values()], axis=0)
    layers = _table(
        ["layer", "lowest share", "highest share", "entropy (1 = even)", "also used by the previous token"],
        [
            [u["layer"], f"{u['min']:.1%}", f"{u['max']:.1%}", f"{u['entropy']:.3f}", f"{r:.2f}"]
            for u, r in zip(usage["layers"], repeat, strict=True)
        ],
    )
    apart = _table(
        ["source", *(f"layer {i}" for i in range(c["layers"]))],
        [
            [s, *(f"{d:.2f} (e{e})" for d, e in zip(dist, usage["favourites"][s], strict=True))]
            for s, dist in usage["distance_from_mean"].items()
        ],
    )
    shown = "\n\n".join(
        f"**{s['kind']}**: {s['prompt']}\n\n"
        + textwrap.indent(s["output"].strip() or "(nothing)", "> ", lambda _: True)
        for s in facts["samples"]
    )
    parts = [
        "---\nlicense: apache-2.0\nlanguage: en\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        "---",
        "# moechat demo model",
        """A very small Mixture-of-Experts language model. It writes simple children's stories,
        mostly about what it is asked for, answers questions about moechat that it was trained on, calls
        simple tools and fills in JSON, often wrongly: "What it keeps to" below has the counts. It exists to
        show and test moechat with a real, trained router; it knows nothing of the world.""",
        "## Architecture",
        f"""Qwen3MoeForCausalLM of `transformers`, no custom code: {c["layers"]} layers, hidden
        size {c["hidden"]}, {c["experts"]} experts of width {c["expert_width"]} per layer,
        {c["top_k"]} per token (weights renormalised), {c["heads"]} attention heads and
        {c["kv_heads"]} key/value heads of size {c["head_dim"]}, context {c["context"]:,}, own
        byte-level BPE vocabulary of {c["vocab"]:,}, input and output embeddings tied.
        {c["total"]:,} parameters, of which {c["active"]:,} work on a token. Stored in bfloat16.""",
        f"""Chat form: `<|user|>question<|end|><|assistant|>answer<|end|>`, with an optional
        `<|system|>instruction<|end|>` first; the template is stored with the tokenizer. Plain
        text needs no start token. `generation_config.json` samples with temperature
        {gen["temperature"]}, top-p {gen["top_p"]} and repetition penalty
        {gen["repetition_penalty"]}.""",
        """Tools stand in the system turn between `<tools>` and `</tools>`, one JSON object a line,
        with the types of their parameters alone; a call is
        `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (the format of Hermes and Qwen),
        and its result comes as a user turn, between `<tool_response>` and
        `</tool_response>`.""",
        "## Training",
        """Each run of `scripts/demo/train.py` continues from the weights before it, with `--data DIR
        --out OUT` and, but for the first, `--start WEIGHTS`.""",
        *(_run_text(i, r) for i, r in enumerate(run["runs"], 1)),
        f"""All in float32 on {run["cpu"]}, which other work shared. Muon for the attention and expert
        matrices, AdamW for embeddings, norms and routers. A balance loss of
        {run["balance_coef"]} per layer, over each mixed batch, keeps the experts in use. In texts made
        by rule only what the model answers counts in the loss. Versions: {run["versions"]}.
        Floating-point sums depend on the processor and the number of threads, so another machine
        gets a similar model, not the same bits.""",
        "## Data",
        licences,
        """The weights and this card are under Apache-2.0. The texts keep their own licences,
        which ask for the attribution given here; TinyStories is under a share-alike agreement
        for the data. Story requests ("Tell me a story about a fox.") were made by rule from
        words of the stories; a few dozen small-talk sentences were written for this model
        (`small_talk`).""",
        """Made by rule for this model, without other sources: `renamed_chat` is TinyStories with other
        names and animals, and requests that name them; `made_stories` fills six plots with drawn
        animals, names, objects and places, and asks for some of them; `answers` is the questions of
        `scripts/demo/answers.txt`, whose answers come from the manual; `tool_calls` offers one to
        three tools with drawn names and parameters, and has calls, results and answers; `json`
        asks for facts of a sentence as a JSON object; `copies` and `repeats` ask for words of the
        question. `made_stories.py`, `made_copies.py` and `made_tools.py` beside the
        training script have the rules.""",
        f"Books: {BOOKS}.",
        "## Held-out quality",
        f"""One document in {HELD_OUT_ONE_IN}, chosen by a hash of its content (books in blocks
        of about 4,000 characters, OpenAssistant by conversation tree, coffee by dialogue id),
        never trained on. Coffee dialogues are formulaic: many held-out ones resemble training
        ones word for word. The figures are of the stored bfloat16 weights computed in float32;
        bytes are those of the text without role markers, and `story_chat` is the held-out
        TinyStories in chat form.""",
        quality,
        "## Expert use",
        f"""Measured on the same texts, every source weighing the same. Even use would be
        {even:.2%} per expert; by chance {chance:.3f} of a token's experts would be those of the
        previous token.""",
        layers,
        """How far the use by one source is from the mean of all (0 = same, 1 = disjoint), and
        in brackets the expert that it prefers most compared with the others:""",
        apart,
        "`train.py` writes the full counts to `eval.json`, beside the checkpoint.",
        "## Samples",
        "Sampled as `generation_config.json` says, seeds 0, 1, 2 and so on; first tries, not chosen.",
        shown,
        "## Not good for",
        """Facts, advice, arithmetic, code, long texts, languages other than English, or
        anything that matters. It loses the thread within a story, repeats itself, and makes
        things up. Its stories about a named animal follow a few plots. It knows the questions of
        `answers.txt` by heart and mixes up others; answers to anything else but small talk and
        coffee orders only have the shape of an answer. It reads nothing but simple tools and
        short sentences: expect wrong calls for others. The old books contain views of their time. There is no
        safety training.""",
    ]
    return "\n\n".join(p if p is shown else _wrap(p) for p in parts) + "\n"


def _wrap(part: str) -> str:
    """Fill running text to the line length; leave headings, tables, code and the front matter alone."""
    return part if part.startswith(("#", "|", "---", "    ")) else textwrap.fill(" ".join(part.split()), 110)


def write_card(out: Path, corpus: Corpus, run: dict) -> None:
    """Measure the model as stored in OUT, loaded as any user would load it; write eval.json and README.md."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tok = AutoTokenizer.from_pretrained(out)
    c, gen = model.config, model.generation_config
    total = sum(p.numel() for p in model.parameters())
    idle = c.num_hidden_layers * (c.num_experts - c.num_experts_per_tok)
    held_out = measure(model, tok, corpus)
    facts = {
        "config": {
            "layers": c.num_hidden_layers,
            "hidden": c.hidden_size,
            "experts": c.num_experts,
            "top_k": c.num_experts_per_tok,
            "expert_width": c.moe_intermediate_size,
            "heads": c.num_attention_heads,
            "kv_heads": c.num_key_value_heads,
            "head_dim": c.head_dim,
            "context": c.max_position_embeddings,
            "vocab": c.vocab_size,
            "total": total,
            "active": total - idle * 3 * c.hidden_size * c.moe_intermediate_size,
        },
        "training": run
        | {
            "cpu": cpu_name(),
            "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        },
        "generation": {
            "temperature": gen.temperature,
            "top_p": gen.top_p,
            "repetition_penalty": gen.repetition_penalty or 1.0,
        },
        "held_out": held_out,
        "usage": usage_summary(held_out),
        "samples": samples(model, tok),
    }
    (out / "eval.json").write_text(json.dumps(facts, indent=1, default=float) + "\n")
    (out / "README.md").write_text(card(facts))
    for source, r in held_out.items():
        print(f"{source}: perplexity {r['perplexity_per_token']:.2f}, {r['bits_per_byte']:.3f} bits per byte")
