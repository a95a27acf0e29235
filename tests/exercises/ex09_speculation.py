"""Wrong and right answers to exercise 9."""

import numpy as np
import torch
from wrong_answers import Mutant

from minillm.ladder import speculative

WALK = """    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1"""
RATIO = "u[i] * q[i, draft] >= p[i, draft]"
MUTANTS = [
    Mutant("verify_greedy", "first draft unchecked", "accepted = 0", "accepted = min(1, len(drafts))",
           caught_by="a wrong first draft leaves the target's own token"),
    Mutant("verify_greedy", "compares with the next place", "== best[accepted]:", "== best[accepted + 1]:",
           caught_by="a wrong first draft leaves the target's own token"),
    Mutant("verify_greedy", "no token of its own", "[*drafts[:accepted], best[accepted]]", "drafts[:accepted]",
           caught_by="a wrong first draft leaves the target's own token"),
    Mutant("verify_greedy", "no token behind the last draft", "[*drafts[:accepted], best[accepted]]",
           "[*drafts[:accepted], best[accepted]][: max(1, len(drafts))]",
           caught_by="right drafts are followed by one token more"),
    Mutant("verify_greedy", "keeps the wrong draft too", "drafts[:accepted]", "drafts[: accepted + 1]",
           caught_by="a wrong first draft leaves the target's own token"),
    Mutant("verify_greedy", "counts every match", WALK,
           "    accepted = sum(a == b for a, b in zip(drafts, best)) * (drafts[:1] == best[:1])",
           caught_by="the first wrong draft ends it"),
    Mutant("verify_greedy", "all or nothing", WALK, "    accepted = len(drafts) * (drafts == best[:-1])",
           caught_by="the first wrong draft ends it"),
    Mutant("verify_greedy", "expects a first draft", "accepted = 0", "accepted = 0 * drafts[0]",
           caught_by="without drafts it is plain decoding"),
    Mutant("verify_greedy", "the last of the target's tokens", "best[accepted]]", "best[-1]]",
           caught_by="a wrong first draft leaves the target's own token"),
    Mutant("verify_greedy", "the first of the target's tokens", "best[accepted]]", "best[0]]",
           caught_by="right drafts are followed by one token more"),
    Mutant("verify_greedy", "writes into the drafts", "return [*drafts[:accepted], best[accepted]]",
           "drafts[accepted:] = [best[accepted]]\n    return drafts", caught_by="the lists stay as they were"),
    Mutant("residual", "subtracts in place", "(p - q).clamp_min(0)", "p.sub_(q).clamp_min(0)",
           caught_by="both distributions stay as they were"),
    Mutant("residual", "not normalised", "left / left.sum() if left.sum() > 0 else p", "left if left.sum() > 0 else p",
           caught_by="it is a distribution: its sum is 1"),
    Mutant("residual", "the wrong way round", "(p - q)", "(q - p)",
           caught_by="only tokens that p gives more often than q are left"),
    Mutant("residual", "the distance", "(p - q).clamp_min(0)", "(p - q).abs()",
           caught_by="only tokens that p gives more often than q are left"),
    Mutant("residual", "p where it is more", "(p - q).clamp_min(0)", "torch.where(p > q, p, 0.0)",
           caught_by="tokens keep the proportions of what is left"),
    Mutant("residual", "softmax instead of a division", "left / left.sum()",
           "torch.where(left > 0, left, -torch.inf).softmax(0)",
           caught_by="tokens keep the proportions of what is left"),
    Mutant("residual", "divides by nothing", "left / left.sum() if left.sum() > 0 else p", "left / left.sum()",
           caught_by="where p and q are equal it gives p"),
    Mutant("verify_sampled", "first draft unchecked", f"if {RATIO}:", f"if i and {RATIO}:",
           caught_by="a draft is accepted with probability p / q"),
    Mutant("verify_sampled", "accepts with p", RATIO, "u[i] >= p[i, draft]",
           caught_by="a draft is accepted with probability p / q"),
    Mutant("verify_sampled", "accepts with q / p", RATIO, "u[i] * p[i, draft] >= q[i, draft]",
           caught_by="a draft is accepted with probability p / q"),
    Mutant("verify_sampled", "accepts with the difference", RATIO, "u[i] >= 1 + p[i, draft] - q[i, draft]",
           caught_by="a draft is accepted with probability p / q"),
    Mutant("verify_sampled", "accepts what is no more likely", RATIO, f"{RATIO} or p[i, draft] == q[i, draft]",
           caught_by="what the target says at least as often is always accepted"),
    Mutant("verify_sampled", "accepts what the target excludes", RATIO, "u[i] * q[i, draft] > p[i, draft]",
           caught_by="what the target never says is never accepted"),
    Mutant("verify_sampled", "no token behind the last draft", "[*drafts, draw(p[-1], u_next)]",
           "drafts or [draw(p[-1], u_next)]", caught_by="accepted drafts are followed by one draw from p behind them"),
    Mutant("verify_sampled", "draws behind the last draft from the row before", "draw(p[-1], u_next)",
           "draw(p[max(0, len(drafts) - 1)], u_next)",
           caught_by="accepted drafts are followed by one draw from p behind them"),
    Mutant("verify_sampled", "goes on behind a rejected draft",
           "return [*drafts[:i], draw(residual(p[i], q[i]), u_next)]",
           "drafts = [*drafts[:i], draw(residual(p[i], q[i]), u_next), *drafts[i + 1 :]]",
           caught_by="the first rejected draft ends it"),
    Mutant("verify_sampled", "subtracts in place", "residual(p[i], q[i])", "residual(p[i].sub_(q[i]), q[i] * 0)",
           caught_by="what is passed in stays as it was"),
    Mutant("verify_sampled", "draws from p after a rejection", "draw(residual(p[i], q[i]), u_next)",
           "draw(p[i], u_next)", caught_by="after a rejection the token comes from what is left over there"),
    Mutant("verify_sampled", "residual of the last place", "residual(p[i], q[i])", "residual(p[-2], q[-1] * 0)",
           caught_by="after a rejection the token comes from what is left over there"),
    Mutant("verify_sampled", "drops the accepted drafts", "[*drafts[:i], draw(residual(p[i], q[i]), u_next)]",
           "[draw(residual(p[i], q[i]), u_next)]", caught_by="the first rejected draft ends it"),
]

SURVIVORS = {}


def greedy_by_products(best, drafts):
    """The number of leading matches as a sum of running products."""
    best, drafts = np.array(best), np.array(drafts, dtype=int)
    matches = np.cumprod(best[: len(drafts)] == drafts).sum()
    return [*drafts[:matches].tolist(), int(best[matches])]


def residual_in_double(p, q):
    """In fp64, as p less what p and q have in common."""
    left = p.double() - torch.minimum(p, q).double()
    return left / left.sum() if left.any() else p.double()


def residual_in_python(p, q):
    left = [max(a - b, 0.0) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    return torch.tensor([number / sum(left) for number in left] if sum(left) else p.tolist())


def sampled_by_products(p, q, drafts, u, u_next):
    """All places at once: ratios, running products, one draw by searchsorted in fp64."""
    k = len(drafts)
    at = torch.tensor(drafts, dtype=torch.long)
    ratios = p[torch.arange(k), at].double() / q[torch.arange(k), at].double()
    accepted = int((torch.tensor(u, dtype=torch.float64) < ratios).long().cumprod(0).sum())
    chosen = p[accepted].double() if accepted == k else residual_in_double(p[accepted], q[accepted])
    token = torch.searchsorted(chosen.cumsum(0), torch.tensor(u_next, dtype=torch.float64), right=True)
    return [*drafts[:accepted], int(token)]


def sampled_by_the_package(p, q, drafts, u, u_next):
    k = len(drafts)
    accepted, following = speculative.verify_sampled(
        p[None], q[None], torch.tensor([drafts], dtype=torch.long).view(1, k), torch.tensor([u]).view(1, k),
        torch.full((1, k + 1), u_next),
    )
    return [*drafts[: int(accepted)], int(following)]


ALTERNATIVES = {
    "verify_greedy": [speculative.verify_greedy, greedy_by_products],
    "residual": [residual_in_double, residual_in_python],
    "verify_sampled": [sampled_by_products, sampled_by_the_package],
}
