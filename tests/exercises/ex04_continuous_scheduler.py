"""Wrong and right answers to exercise 4."""

from collections import deque

from wrong_answers import Mutant

LEAVES = "who has finished leaves at once, and a waiting request takes its row in the next step"
WITHIN = "counts of a step stay within the budget, and none is 0"
TASK = "continuous_scheduler"
DECODES = "then it feeds one token a step, until it has finished"

MUTANTS = [
    Mutant(TASK, "counts what was fed as one token", "request.num_kv += count", "request.num_kv += 1",
           caught_by=DECODES),
    Mutant(TASK, "samples for every row", "if request.num_pending == 0:", "if True:",
           caught_by="no token is sampled before the prompt is complete"),
    Mutant(TASK, "samples when one token is still missing", "if request.num_pending == 0:",
           "if request.num_pending <= 1:", caught_by="no token is sampled before the prompt is complete"),
    Mutant(TASK, "a running prompt at once", "count = min(request.num_pending, budget)\n                rows",
           "count = request.num_pending\n                rows",
           caught_by="a prompt that exceeds the budget is fed in chunks"),
    Mutant(TASK, "decodes wait while a prompt is under way",
           "            if request.num_pending == 1:",
           "            if request.num_pending == 1 and all(r.num_pending == 1 for r in self.running):",
           caught_by="decodes come before prompts"),
    Mutant(TASK, "one pass over all that run",
           """            if request.num_pending == 1:
                rows.append((request, 1))
                budget -= 1
        for request in self.running:
            if request.num_pending > 1:""", "            if budget > 0:",
           caught_by="decodes come before prompts", says="stands in front of a decoding request"),
    Mutant(TASK, "waits until a prompt fits whole", "while self.waiting and budget > 0 and",
           "while self.waiting and budget >= self.waiting[0].num_pending and",
           caught_by="a prompt that exceeds the budget is fed in chunks", says="never joins"),
    Mutant(TASK, "gives the token to a list that the engine's requests do not have",
           "request.append(next_token(request))", "request.output.append(next_token(request))",
           caught_by=DECODES, says="Your code raised AttributeError"),
    Mutant(TASK, "decodes do not use the budget", "rows.append((request, 1))\n                budget -= 1",
           "rows.append((request, 1))", caught_by=WITHIN, says="must reduce what is left"),
    Mutant(TASK, "joins without budget", "while self.waiting and budget > 0 and", "while self.waiting and",
           caught_by=WITHIN, says="Look at 'Joining'"),
    Mutant(TASK, "one prompt a step", "len(self.running) < self.max_batch:",
           "len(self.running) < self.max_batch and not any(n > 1 for _, n in rows):",
           caught_by="the whole budget is used while there is work"),
    Mutant(TASK, "one row too many", "len(self.running) < self.max_batch", "len(self.running) <= self.max_batch",
           caught_by="at most max_batch requests run"),
    Mutant(TASK, "joins an empty batch only", "while self.waiting and budget > 0 and",
           "empty = not rows\n        while self.waiting and budget > 0 and empty and", caught_by=LEAVES),
    Mutant(TASK, "finished ones stay until all have ended",
           "[request for request in self.running if not request.finished]",
           "self.running if not all(r.finished for r in self.running) else []",
           caught_by=LEAVES),
    Mutant(TASK, "takes them out of the list it goes over",
           "self.running = [request for request in self.running if not request.finished]",
           "for request in self.running:\n            if request.finished:\n"
           "                self.running.remove(request)",
           caught_by="several may finish in the same step"),
    Mutant(TASK, "the newest first", "self.waiting.popleft()", "self.waiting.pop()",
           caught_by="nobody overtakes in the queue"),
    Mutant(TASK, "the shortest prompt first", "            request = self.waiting.popleft()\n",
           "            request = min(self.waiting, key=lambda r: r.num_tokens)\n"
           "            self.waiting.remove(request)\n",
           caught_by="nobody overtakes in the queue"),
]

SURVIVORS = {}


class FeedingInOneLoop:
    """Lets requests join first, as far as there will be budget, then feeds in two passes."""

    def __init__(self, max_batch, max_step_tokens):
        self.rows, self.tokens = max_batch, max_step_tokens
        self.waiting, self.running = deque(), []

    def add(self, request):
        self.waiting.append(request)

    def plan(self):
        decoding = [request for request in self.running if request.num_pending == 1]
        counts = {id(request): 1 for request in decoding}
        left = self.tokens - len(decoding)
        for request in [r for r in self.running if r.num_pending > 1] + list(self.waiting):
            new = request in self.waiting
            if left == 0 or (new and len(self.running) == self.rows):
                break
            if new:
                self.running.append(self.waiting.popleft())
            counts[id(request)] = min(left, request.num_pending)
            left -= counts[id(request)]
        return [[request, counts[id(request)]] for request in self.running if id(request) in counts]

    def commit(self, rows, next_token):
        for request, count in rows:
            request.num_kv = request.num_kv + count
            if request.num_kv == request.num_tokens:
                request.append(next_token(request))
                if request.finished:
                    self.running.remove(request)


class TokenByToken(FeedingInOneLoop):
    """Deals the budget out a token at a time."""

    def plan(self):
        fed, budget = {}, self.tokens

        def feed(request):
            nonlocal budget
            while budget and fed.get(request, 0) < request.num_pending:
                fed[request] = fed.get(request, 0) + 1
                budget -= 1

        for wanted in (True, False):
            for request in self.running:
                if (request.num_pending == 1) is wanted:
                    feed(request)
        while budget and self.waiting and len(self.running) < self.rows:
            self.running.append(self.waiting.popleft())
            feed(self.running[-1])
        return sorted(fed.items(), key=lambda item: item[1])


ALTERNATIVES = {TASK: [FeedingInOneLoop, TokenByToken]}
