"""Families of decode batches. Each is drawn from a generator and returns its requests and a line on what was drawn.

rollouts        prompts with 2 to 128 samples each; prompts of 0.5K to 16K, log-normal; outputs exponential,
                log-normal or equal; a server in steady state, whose finished samples were replaced, or a start
long_documents  2 to 64 requests on documents of 8K to 256K tokens
questions       a system prompt, documents below it, questions below these, some of them sampled several times
few_shot        64 to 512 requests below the examples of 1 to 8 tasks
agents          Zipf chains of nodes of 1 to 3,000 tokens
thought         trees of thought: branches of 2 to 5 at each of 2 to 5 levels
ragged          no sharing: bucketed, homogeneous, bimodal, uniform or Zipf lengths, as PersistentKV draws them
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.workloads.case import Path
from benchmarks.workloads.lengths import Batch, Rng, exponential, log_normal, log_uniform, zipf_index

MOST_REQUESTS = 1024
SAMPLES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
RAGGED = ("bucketed", "homogeneous", "bimodal", "uniform", "zipf")
LONGEST_OUTPUT = 32_768
Family = Callable[[Rng, Batch], str]


def outputs_so_far(rng: Rng, kind: str, mean: float, steady: bool, count: int) -> list[int]:
    """Tokens that running samples have generated.

    Steady state: a running sample is met at a uniform point of an output that is drawn by its length. Start: all have
    the same number of tokens, since they began together and the finished ones are gone.
    """
    if kind == "equal" or not steady:
        return [max(1, round(mean * rng.uniform(0.05, 1.5)))] * count
    if kind == "exponential":
        return exponential(rng, mean, 1, LONGEST_OUTPUT, count)  # the same distribution again
    sigma = 0.8
    total = log_normal(rng, mean * float(rng.uniform(0.7, 1.0)), sigma, 1, LONGEST_OUTPUT, count)
    return [max(1, int(tokens * part)) for tokens, part in zip(total, rng.uniform(size=count), strict=True)]


def rollouts(rng: Rng, batch: Batch) -> str:
    samples = int(rng.choice(SAMPLES))
    prompts = max(1, log_uniform(rng, 16, MOST_REQUESTS) // samples)
    kind = str(rng.choice(["exponential", "log-normal", "equal"], p=[0.5, 0.3, 0.2]))
    steady = bool(rng.random() < 0.75)
    mean, median = log_uniform(rng, 300, 6000), log_uniform(rng, 700, 6000)
    alive = float(rng.choice([1.0, rng.uniform(0.3, 1.0)]))
    system: Path = batch.extend([], log_uniform(rng, 64, 2048) if rng.random() < 0.3 else 0)
    lengths = log_normal(rng, median, 0.6, 512, 16_384, prompts)
    own = outputs_so_far(rng, kind, mean, steady, prompts * samples)
    running = rng.random(prompts * samples) < alive
    running[0] = True
    for prompt, tokens in enumerate(lengths):
        path = batch.extend(system, tokens)
        for request in range(prompt * samples, (prompt + 1) * samples):
            if running[request]:
                batch.add(path, own[request])
    state = "steady" if steady else "start"
    return f"{prompts} x {samples}, prompts {median}, outputs {kind} {mean}, {state}, {alive:.2f} running"


def long_documents(rng: Rng, batch: Batch) -> str:
    documents = int(rng.choice([1, 1, 1, 2, 4]))
    requests, mean = log_uniform(rng, 2, 64), log_uniform(rng, 32, 1024)
    tokens = [log_uniform(rng, 8192, 262_144) for _ in range(documents)]
    own = exponential(rng, mean, 1, 8192, requests)
    paths = [batch.extend([], length) for length in tokens]
    for request, length in enumerate(own):
        batch.add(paths[request * documents // requests], length)
    return f"{requests} requests on {tokens}, outputs {mean}"


def questions(rng: Rng, batch: Batch) -> str:
    system = batch.extend([], log_uniform(rng, 32, 2048) if rng.random() < 0.8 else 0)
    documents, asked, median = log_uniform(rng, 1, 16), log_uniform(rng, 2, 32), log_uniform(rng, 2048, 32_768)
    samples = int(rng.choice([1, 1, 1, 4, 8]))
    for tokens in log_normal(rng, median, 0.7, 512, 131_072, documents):
        document = batch.extend(system, tokens)
        for length in log_normal(rng, 80, 0.8, 8, 1024, max(1, int(rng.poisson(asked)))):
            question = batch.extend(document, length)
            for own in exponential(rng, 200, 1, 2048, samples):
                batch.add(question, own)
    return f"{documents} documents of {median}, {asked} questions each, {samples} answers"


def few_shot(rng: Rng, batch: Batch) -> str:
    tasks, requests = log_uniform(rng, 1, 8), log_uniform(rng, 64, 512)
    instruction = batch.extend([], log_uniform(rng, 32, 1024) if rng.random() < 0.5 else 0)
    examples = [log_uniform(rng, 512, 16_384) for _ in range(tasks)]
    paths = [batch.extend(instruction, length) for length in examples]
    median = log_uniform(rng, 32, 512)
    task_of = sorted(zipf_index(rng, tasks, 1.0) for _ in range(requests))
    for task, own in zip(task_of, log_normal(rng, median, 0.7, 1, 4096, requests), strict=True):
        batch.add(paths[task], own)
    return f"{requests} requests, {tasks} tasks of {examples}, own {median}"


def agents(rng: Rng, batch: Batch) -> str:
    requests, kinds, depth = log_uniform(rng, 8, 256), log_uniform(rng, 1, 12), log_uniform(rng, 2, 12)
    exponent = float(rng.uniform(0.7, 1.5))
    system = batch.extend([], log_uniform(rng, 64, 3000))
    chains: dict[tuple[int, ...], Path] = {(): system}
    for _ in range(requests):
        at: tuple[int, ...] = ()
        for level in range(1 + int(rng.integers(depth))):
            step = (*at, zipf_index(rng, kinds if level == 0 else 4, exponent + 0.5 * level))
            if step not in chains:
                chains[step] = batch.extend(chains[at], log_uniform(rng, 1, 3000))
            at = step
        batch.add(chains[at], log_uniform(rng, 1, 3000))
    return f"{requests} agents of {kinds} kinds, up to {depth} deep, Zipf {exponent:.2f}"


def thought(rng: Rng, batch: Batch) -> str:
    problems, levels, branches = log_uniform(rng, 1, 16), int(rng.integers(2, 6)), int(rng.integers(2, 6))
    median = log_uniform(rng, 32, 400)
    system = batch.extend([], log_uniform(rng, 64, 2048) if rng.random() < 0.6 else 0)
    most = max(1, 512 // problems)
    for _ in range(problems):
        front = [batch.extend(system, log_uniform(rng, 256, 4096))]
        for _ in range(levels):
            if len(front) * branches > most:
                break
            front = [
                batch.extend(path, length)
                for path in front
                for length in log_normal(rng, median, 0.5, 4, 2048, branches)
            ]
        for path in front:
            for own in exponential(rng, median, 1, 2048, branches):
                batch.add(path, own)
    return f"{problems} problems, {levels} levels of {branches}, thoughts {median}"


def ragged(rng: Rng, batch: Batch) -> str:
    kind = str(rng.choice(RAGGED))
    requests, longest = log_uniform(rng, 1, 512), log_uniform(rng, 2048, 65_536)
    if kind == "bucketed":
        lengths = (longest // 2 ** rng.integers(0, 6, requests)).tolist()
    elif kind == "homogeneous":
        lengths = [longest // 4] * requests
    elif kind == "bimodal":
        lengths = [longest if long else 128 + longest // 64 for long in rng.random(requests) < 0.1]
    elif kind == "uniform":
        lengths = rng.integers(16, longest, requests).tolist()
    else:
        lengths = [max(16, longest // (1 + zipf_index(rng, 256, 1.1))) for _ in range(requests)]
    for length in lengths:
        batch.add([], length)
    return f"{requests} requests, {kind}, up to {longest}"


FAMILIES: dict[str, Family] = {
    "rollouts": rollouts,
    "long_documents": long_documents,
    "questions": questions,
    "few_shot": few_shot,
    "agents": agents,
    "thought": thought,
    "ragged": ragged,
}
