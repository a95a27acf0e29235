# %% [markdown]
# # 6 · Speculative decoding
#
# A decode step reads all the weights to make one token (chapter 1). If the next few tokens are guessed, one step can
# check them all. Wrong guesses are thrown away, so the answer stays what it was (rung 6). This chapter guesses in
# two ways, counts what is accepted, and finds the batch from which guessing costs more than it gives.
#
# **You will learn**
# - how one forward verifies several guesses, and why the answer cannot change;
# - what a guess must be worth to pay, for one request and for a batch;
# - why the same drafts are right on one kind of text and wrong on another;
# - what a drafter of one layer can know that a lookup cannot.
#
# **To run this page**: `make lab` in the repository, or `pip install -e ".[lab]"` and open the notebook.

# %%
# Where the package is missing, as on Colab: open this page inside a copy of the repository, and this installs it.
# ("minillm" on PyPI is another project.)
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("minillm") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "..[lab]"], check=True)

# %%
import torch

import minillm
from minillm.measure.measurement import device_name

model, tokenizer = minillm.load_model(dtype="fp32"), minillm.load_tokenizer()
print(device_name(model.device))

# %% [markdown]
# ## Build: propose
#
# The cheapest guess costs nothing: what followed the last few tokens when they last occurred? It is right wherever a
# text repeats its prompt or itself. A guess is called a *draft*; the model that answers is called the *target*.

# %%
def propose(text, number, longest=3):
    """Up to `number` tokens that followed the latest earlier occurrence of the text's own last 3, 2 or 1 tokens."""
    for n in range(longest, 0, -1):
        end = text[-n:]
        for start in range(len(text) - n - 1, -1, -1):  # the latest first
            if text[start : start + n] == end:
                return text[start + n : start + n + number]
    return []


# %%
# NBVAL_CHECK_OUTPUT
ferries = tokenizer.encode("The ferries stop in December. In spring they sail again, but not before the ferries stop")
print("drafted:", [tokenizer.decode([token]) for token in propose(ferries, 4)])

# %% [markdown]
# ## Build: verify
#
# The request feeds its newest token and the drafts after it: five tokens instead of one, which to the model is a
# short prompt. The logits after each of them say what the target would have said there. Drafts count as long as they
# agree, and the target's own next token comes for free.

# %%
def agreeing(drafts, best):
    """How many of the first drafts the target would have said itself. best: its own choice after each [k + 1]."""
    count = 0
    while count < len(drafts) and drafts[count] == best[count]:
        count += 1
    return count


# %%
# NBVAL_CHECK_OUTPUT
for best, meaning in (([5, 6, 7], "both right: three tokens from one forward"),
                      ([5, 9, 7], "the second is wrong: the target's 9 takes its place"),
                      ([4, 6, 7], "the first is wrong: what follows it means nothing")):
    print(best[: agreeing([5, 6], best) + 1], meaning)

# %% [markdown]
# The loop is chapter 1's, with its cache. Two things change: what is fed, and how many tokens come of a step. Rejected
# drafts have left keys in the cache; `length` is set back before them, so that the next tokens overwrite them.

# %%
from minillm.ladder.decode import SequenceCache, decode_cached


@torch.inference_mode()
def decode_with_drafts(prompt, max_tokens, k):
    """Greedy tokens, up to k drafts a round -> the answer, and of each round its drafts and its tokens."""
    text, ends_at, rounds = list(prompt), len(prompt) + max_tokens, []
    cache = SequenceCache(model, capacity=ends_at)
    while len(text) < ends_at:
        drafts = propose(text, min(k, ends_at - len(text) - 1)) if cache.length else []  # not with the prompt
        fed = text[cache.length :] + drafts  # the prompt, later the newest token, and the drafts
        positions = torch.arange(cache.length, cache.length + len(fed), device=model.device)  # [N]
        asked = torch.arange(len(fed) - len(drafts) - 1, len(fed), device=model.device)  # [k + 1]
        logits = model.forward(torch.tensor(fed, device=model.device), positions, cache, asked)  # [k + 1, V]
        best = logits.argmax(-1).tolist()
        right = agreeing(drafts, best)
        cache.length = len(text) + right  # what the rejected drafts stored counts no more
        text += best[: right + 1]
        rounds.append((drafts, best[: right + 1]))
    return text[len(prompt) :], rounds


# %% [markdown]
# Is it right? Nothing that was drafted can change the answer: with four drafts and with one it must be the one of
# chapter 1's loop, for a request that quotes a passage and for one that chats. And the rounds must be those of the
# package, draft by draft.

# %%
# NBVAL_CHECK_OUTPUT
from minillm import Engine, SamplingParams
from minillm.course.prompts import CHAT_PROMPTS, COPY_PROMPTS
from minillm.course.show.explore import Watched, draft_rounds
from minillm.ladder.speculative import NgramIndex, NgramProposer, Speculator, verify_greedy, verify_sampled

copied, chatted = tokenizer.chat(COPY_PROMPTS[0]), tokenizer.chat(CHAT_PROMPTS[1])
for name, prompt in (("quoting", copied), ("chatting", chatted)):
    plain = list(decode_cached(model, prompt, 20))
    runs = {k: decode_with_drafts(prompt, 20, k) for k in (4, 1)}
    watched = Watched(NgramProposer())
    package = draft_rounds(Engine(model, tokenizer, speculator=Speculator(watched, 4)), watched, prompt, 20)
    print(f"{name}: same tokens, by k: { {k: answer == plain for k, (answer, _) in runs.items()} }; "
          f"same rounds as the package: {runs[4][1] == [(entry.drafts, entry.tokens) for entry in package]}")

# %% [markdown]
# Here is the answer that quotes. The boxes are its tokens, in order; below them are the drafts that the target
# rejected, each run where the target said something else.

# %%
import os

from minillm.course.show import cache_drawings, plots

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
answer_tokens = 24 if QUICK else 42


def words(token):
    return tokenizer.decode([token])


cache_drawings.draft_tree(decode_with_drafts(copied, answer_tokens, 4)[1], words)

# %% [markdown]
# And the one that chats:

# %%
cache_drawings.draft_tree(decode_with_drafts(chatted, answer_tokens, 4)[1], words)

# %% [markdown]
# Now the package's source.

# %%
from minillm.course.show.source import show_source

show_source(verify_greedy, NgramProposer.propose, NgramIndex.continuation)

# %% [markdown]
# What it adds to ours:
#
# - an index of all runs of up to three tokens, which grows with the text; ours searches the whole text in every round;
# - many rows: a step verifies the drafts of all of them in one forward, as many as its token budget allows;
# - other proposers in place of the lookup, and sampled answers: both follow on this page.
#
# %% [markdown]
# ## Predict
#
# A service quotes documents and also chats. Say each draft is accepted with probability $a$, given that its
# predecessors were. A round of $k$ drafts then gives $1 + a + a^2 + \dots + a^k$ tokens. Say that verifying four drafts
# makes a step 1.25 times as long; what it does here is measured below.
#
# - How many tokens does a round of four give at $a = 0.8$? At $a = 0.2$?
# - Which of the two pays, and by how much?
#
# Put your guesses in place of `None`; the page compares them with what is measured.

# %%
from minillm.course.show.guesses import guess, guesses, reveal

guess("tokens a round of four, a = 0.8", None)
guess("tokens a round of four, a = 0.2", None)
guess("times as fast, n-gram on quoted text, one request", None)
guess("times as fast, n-gram on chat, one request", None)

# %%
# NBVAL_CHECK_OUTPUT
from minillm.course.experiments import speculation

for acceptance in (0.8, 0.2):
    tokens = speculation.expected_tokens(acceptance, 4)
    print(f"a = {acceptance}: {tokens:.2f} tokens a round; with steps 1.25 times as long, "
          f"{tokens / 1.25:.2f} times as fast")

# %%
for acceptance in (0.8, 0.2):
    reveal(f"tokens a round of four, a = {acceptance}", speculation.expected_tokens(acceptance, 4))

# %% [markdown]
# ## Round by round
#
# The answer that quotes once more, with the package: move the slider (with the arrow keys, too). In which round does
# the lookup first find the passage, and how many forwards does the whole answer take? Blue is what was drafted and
# accepted; underlined is what the target said itself; struck out is what the last round drafted and lost. Without a
# running kernel you see one round.

# %%
from minillm.course.show.widgets import draft_stepper

watched = Watched(NgramProposer())
engine = Engine(model, tokenizer, speculator=Speculator(watched, 4))
copied_rounds = draft_rounds(engine, watched, copied, answer_tokens)
draft_stepper(tokenizer, copied_rounds, start=min(4, len(copied_rounds)))

# %% [markdown]
# ## The same tokens in a batch
#
# Two kinds of drafts (the second is described below), two lengths, and both prompts in one batch, against plain
# decoding:

# %%
# NBVAL_CHECK_OUTPUT
from minillm.extras.drafter import Drafter, DrafterProposer, load_drafter, read_card

drafter = load_drafter(model)
prompts, params = [copied, chatted], SamplingParams(max_tokens=12)
plain = [done.token_ids for done in Engine(model).generate(prompts, params)]
for name, make in (("n-gram", NgramProposer), ("drafter", lambda: DrafterProposer(drafter))):
    for k in (1, 8):
        engine = Engine(model, speculator=Speculator(make(), k))
        same = [done.token_ids for done in engine.generate(prompts, params)] == plain
        print(f"{name}, k = {k}: same tokens {same}")

# %% [markdown]
# When an answer is sampled there is no one right token. There, a draft $x$ is accepted with probability
# $\min(1, p(x)/q(x))$: $p$ is what the target would draw from, $q$ what the drafter drew from. After the first
# rejection the token comes from $\max(0, p - q)$, renormalised. The two cases together give exactly $p$. Try it:
# 100,000 drafts from a bad drafter, on four ids of which the target excludes the last.

# %%
# NBVAL_CHECK_OUTPUT
p, q = torch.tensor([0.6, 0.3, 0.1, 0.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
make, draws = torch.Generator().manual_seed(0), 100_000
drafted = torch.multinomial(q, draws, True, generator=make)[:, None]
u = torch.rand(draws, 1, generator=make, dtype=torch.float64)
u_next = torch.rand(draws, 2, generator=make, dtype=torch.float64)
accepted, following = verify_sampled(p.expand(draws, 2, -1), q.expand(draws, 1, -1), drafted, u, u_next)
said = torch.where(accepted > 0, drafted[:, 0], following).bincount(minlength=4) / draws
print("target  ", [round(float(share), 2) for share in p])
print("drafter ", [round(float(share), 2) for share in q])
print("emitted ", [round(float(share), 2) for share in said])
print(f"drafts accepted: {accepted.float().mean():.0%}")

# %% [markdown]
# ## What a step costs
#
# The other half of the sum: how much longer is a step that verifies? At batch 1 the weights must be read anyway, and
# a few more tokens hardly show. The larger the batch, the less arithmetic lies idle that they could use. Predict: how
# many times as long is a step with four drafts a row, at batch 1 and in the largest batch?

# %%
guess("a step with four drafts over a plain one, batch 1", None)
guess("a step with four drafts over a plain one, largest batch", None)

# %%
from minillm.course.show.tables import text_table

batches, lengths = ((1, 4), (0, 2, 4, 8)) if QUICK else ((1, 4, 16), (0, 1, 2, 4, 6, 8))
costs = list(speculation.step_costs(model, batches, lengths, repeats=2 if QUICK else 4))
STEPS = {"batch": "batch", "k": "drafts a row", "step_tokens": "tokens verified", "step_ms": "ms",
         "times_plain": "times"}
print(text_table(costs, STEPS))

# %%
curves = {f"batch {batch}": ([row["k"] for row in costs if row["batch"] == batch],
                             [row["times_plain"] for row in costs if row["batch"] == batch]) for batch in batches}
at_4 = {row["batch"]: row["times_plain"] for row in costs if row["k"] == 4}
reveal("a step with four drafts over a plain one, batch 1", at_4[1])
reveal("a step with four drafts over a plain one, largest batch", at_4[batches[-1]])
plots.curves(
    curves, f"Verifying four drafts: a step {at_4[1]:.2f} times as long at batch 1, {at_4[batches[-1]]:.2f} times at "
    f"batch {batches[-1]}", "drafts a row", "a step, in plain steps", level=("a plain step", 1.0),
)

# %% [markdown]
# ## A drafter that reads the target's states
#
# Looking back cannot guess what was never said. A small draft model could, but it must work out everything again. The
# target's last hidden state already holds what it is about to say, and more. Our drafter is one decoder layer over
# these states and the tokens that were then chosen; it shares the target's embedding and head. To draft a second
# token it takes its own guess for the hidden state.

# %%
show_source(Drafter.forward, DrafterProposer.observe)

# %% [markdown]
# Its card says how far it was trained, by `python -m minillm.course.drafter_training.training`: on text that
# the target wrote, beginning with the best linear guess at the next state (a ridge regression from the two inputs)
# and a layer that adds nothing, which then learns to. Two cores need half an hour for all of it.

# %%
# NBVAL_CHECK_OUTPUT
card = read_card()
print(f"{card['texts']:,} texts of the target, {card['tokens']:,} tokens, {card['steps']:,} steps, "
      f"seed {card['seed']}")
print(f"it may propose {card['ids']:,} of the {model.config.vocab_size:,} ids")

# %% [markdown]
# How far does each get? Three kinds of drafts, four to a round, in the largest batch of this page: a lookup where the
# answer quotes its prompt, a lookup in chat, and the drafter in chat. By place: the first draft of a round, the second,
# and so on, each counted where those before it were right. The prompts are none that the drafter was trained on. (Of
# those to be copied there are eight; a larger batch asks them again.)

# %%
bench = speculation.DraftBenchmark(model, tokenizer, few=1 if QUICK else 3, tokens=12 if QUICK else 40, turns=2,
                                   seed=0)
kinds = (("copy", "n-gram"), ("chat", "n-gram"), ("chat", "drafter"))
full = {kind: bench.row(*kind, 4, batches[-1], costs) for kind in kinds}
PLACES = {"prompts": "prompts", "drafts": "drafts", "place": "place", "tried": "tried", "right": "right",
          "share": "share"}
places = [
    {"prompts": kind[0], "drafts": kind[1], "place": place, "tried": tried, "right": right,
     "share": right / tried if tried else None}
    for kind, row in full.items()
    for place, (tried, right) in enumerate(zip(row["tried_by_place"], row["right_by_place"], strict=True), start=1)
]
print(text_table(places, PLACES))

# %%
ENOUGH = 10  # tries: a share of fewer is left out of the picture
shares = {}
for kind in kinds:
    own = [row for row in places if (row["prompts"], row["drafts"]) == kind and row["tried"] >= ENOUGH]
    shares[f"{kind[1]} on {kind[0]}"] = [row["place"] for row in own], [row["share"] for row in own]
first = [f"{row['drafts']} on {row['prompts']} {row['share']:.0%}" for row in places if row["place"] == 1]
plots.curves(
    {name: points for name, points in shares.items() if points[0]},
    f"A first draft is right, of those tried: {', '.join(first)}",
    f"place of the draft in its round (where at least {ENOUGH} were tried)", "share accepted",
)

# %% [markdown]
# Later places can do better than the first: a third draft exists only inside a matching passage. But fewer and fewer
# rounds get there.
#
# ## Measure: one request, then a batch
#
# Speed-up over plain decoding of the same prompts in the same batch, on steps in which the whole batch decodes: the
# median of two turns. Beside it stands the prediction: measured tokens a step over the measured cost of such a step.
# What proposing costs is not in the prediction: a drafter, which computes for each draft, should stay below it. The
# drafter runs once more with one draft a round, its surest, and with a length that adapts.

# %%
table = [
    full[kind] if batch == batches[-1] else bench.row(*kind, 4, batch, costs)
    for kind in kinds for batch in batches
]
table += [bench.row("chat", "drafter", 1, batch, costs) for batch in batches]  # one surer draft
table += [bench.row("chat", "drafter", "adaptive", batch, costs) for batch in batches[-1:]]
SPEEDS = {"prompts": "prompts", "drafts": "drafts", "k": "k", "batch": "batch", "speedup": "times plain",
          "predicted": "predicted"}
print(text_table(table, SPEEDS))
alone = {row["prompts"]: row["speedup"] for row in table if (row["drafts"], row["batch"]) == ("n-gram", 1)}
reveal("times as fast, n-gram on quoted text, one request", alone["copy"])
reveal("times as fast, n-gram on chat, one request", alone["chat"])

# %% [markdown]
# When is a gain a gain? Plain decoding ran in both turns, and the two should be equally fast. The most that they differ
# by, in any batch, is taken as noise: a speed-up that is nearer to 1 is neither a gain nor a loss.

# %%
pairs = [[speculation.tokens_per_s(records, batch) for records, _ in runs] for (_, batch), runs in bench.plain.items()]
noise = max(max(pair) / min(pair) - 1 for pair in pairs)


def outcome(row):
    far = row["speedup"] > 1 + noise or row["speedup"] < 1 / (1 + noise)
    return "within noise" if not far else "gains" if row["speedup"] > 1 else "costs"


def name_of(row):
    return f"{row['drafts']} on {row['prompts']}, k = {row['k']}"


print(f"noise: {noise:.1%}")
outcomes = {}
for row in table:
    outcomes.setdefault(name_of(row), []).append((row["batch"], outcome(row)))
for name, found in outcomes.items():
    print(f"{name}:", "; ".join(f"batch {batch} {word}" for batch, word in found))

# %%
lines = {}
for name in outcomes:
    own = [row for row in table if name_of(row) == name]
    if len(own) > 1:
        lines[name] = [row["batch"] for row in own], [row["speedup"] for row in own]
said = []
for name in [name for name in lines if "k = 4" in name]:
    found = [f"{word} at {', '.join(str(batch) for batch, other in outcomes[name] if other == word)}"
             for word in dict.fromkeys(word for _, word in outcomes[name])]
    said.append(f"{name.removesuffix(', k = 4')} {', '.join(found)}")
plots.curves(lines, f"Four drafts, beyond noise: {'; '.join(said)}", "requests in the batch",
             "speed-up over plain decoding", log_x=True, level=("plain decoding", 1.0))

# %% [markdown]
# And the predictions: which of them missed by more than the noise?

# %%
def share(row):
    return row["speedup"] / row["predicted"]


missed = [row for row in sorted(table, key=share) if not 1 / (1 + noise) <= share(row) <= 1 + noise]
print(f"{len(missed)} of {len(table)} predictions missed by more than {noise:.1%}")
for row in missed:
    print(f"{name_of(row)}, batch {row['batch']}: predicted {row['predicted']:.2f}, measured {row['speedup']:.2f}, "
          f"which is {share(row):.2f} of it")

# %% [markdown]
# A drafter's speed-up that lies far below its prediction is what proposing costs: it runs once for each draft, and the
# sum does not count that. Where a lookup misses, which costs nearly nothing, the sum's other input was off: what a step
# costs was measured on short texts, of which every draft was rejected, and at another moment of this machine. A miss
# in both directions says that the moment mattered; misses below alone, that longer texts make a step dearer.

# %%
# NBVAL_CHECK_OUTPUT
print("every run gave plain decoding's tokens:", all(row["same_tokens"] for row in table))

# %% [markdown]
# What would a better drafter buy? That takes no run: the tokens of a round follow from its acceptance $a$ by the sum of
# the prediction, and the costs of a step were measured above. With a running kernel the controls move: from which
# acceptance on do drafts pay in the largest batch, and how many of them? No drafter made these curves.

# %%
from minillm.course.show.widgets import acceptance_explorer

acceptance_explorer(costs, batch=batches[-1])

# %% [markdown]
# On other devices:

# %%
from minillm.course.show.recorded import ledger, recorded

print(recorded("speculation", SPEEDS, part="real"))

# %% [markdown]
# ## Where it loses
#
# **A full batch.** Each draft that is rejected took arithmetic that another request could have used.
# `AdaptiveSpeculator` chooses $k$ at every step from recent acceptance and recent step times, down to 0; now and then
# it tries another length to see whether that has changed. The last line of the table above is such a run.

# %%
from minillm.extras.adaptive import AdaptiveSpeculator, StepCost

show_source(AdaptiveSpeculator.draft_length, StepCost.seconds)

# %% [markdown]
# **Text that cannot be guessed.** The lookup drafts in vain where nothing repeats.
#
# **Latency between tokens.** Tokens come in bunches, and each step takes longer than a plain one. So between two
# bunches the text stands still for longer, even where it is faster by the token. One request alone:

# %%
for row in table:
    if row["batch"] == 1 and row["k"] == 4:
        print(f"{row['drafts']} on {row['prompts']}: {1e3 / row['tokens_per_s']:.0f} ms a token, "
              f"{row['itl_step_p50_ms']:.0f} ms from step to step; "
              f"plain decoding {1e3 / row['plain_tokens_per_s']:.0f} ms")

# %% [markdown]
# **Memory.** A draft model keeps keys and values of its own under the same blocks, so fewer requests fit.

# %%
# NBVAL_CHECK_OUTPUT
from minillm.ladder.quantized import kv_bytes_per_token

target_bytes, drafter_bytes = kv_bytes_per_token(model.config, "fp32"), DrafterProposer(drafter).bytes_per_token
share = drafter_bytes / target_bytes
print(f"a token: {target_bytes:,} bytes for the target, {drafter_bytes:,} for the drafter ({share:.0%})")

# %% [markdown]
# ## Claims of the ledger that this page settles
#
# By the [ledger](CLAIMS.md)'s own rules: on this device, just now, and on every device that has a recorded run.

# %%
judged = [*table, *costs, *speculation.crossovers(table), speculation.sampling_check(20_000, seed=0)]
print(ledger(dict.fromkeys(("E1", "E2", "E3", "E4"), judged)))

# %%
guesses()  # yours, the nearest first

# %% [markdown]
# ## What a production engine calls this
#
# | here | vLLM | SGLang |
# |---|---|---|
# | `NgramProposer` | `--speculative-config '{"method": "ngram", ...}'` | `--speculative-algorithm NGRAM` |
# | `DraftModelProposer` | a draft `model` in the same config | `STANDALONE` |
# | `DrafterProposer` | `"method": "eagle"` or `"eagle3"` | `EAGLE`, `EAGLE3` |
# | `draft_length` | `num_speculative_tokens` | `--speculative-num-steps`, `--speculative-num-draft-tokens` |
# | acceptance rate | accepted over draft tokens, of `vllm:spec_decode_*` | `accept_length` counts tokens a round |
#
# ## Exercise
#
# A step that verifies four drafts takes 2.2 plain steps in a batch of 16. Which acceptance $a$ must the drafts have so
# that $k = 4$ pays there? Give it to two digits; the check computes it. In
# [exercise 9](../exercises/09_speculation.ipynb) you write both verifications yourself, and in
# [exercise 13](../exercises/13_your_engine.ipynb) your answers become an engine that serves SmolLM2.

# %%
break_even = None

# %%
steps = [a / 100 for a in range(101)]
right = next(a for a in steps if speculation.expected_tokens(a, 4) >= 2.2)
verdict = "right" if break_even is not None and abs(break_even - right) < 0.015 else "no: sum the series"
print("not answered yet" if break_even is None else verdict)

# %% [markdown]
# [How these pages are made](README.md) · before: [5 · Quantised KV](05_quantized_kv.ipynb) · next:
# [7 · Serving metrics](07_serving_metrics.ipynb)
