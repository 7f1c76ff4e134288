"""Draws bodies of requests from a grammar of the fields that SGLang's server takes, right ones and wrong ones."""

from __future__ import annotations

import random
from typing import Any

Body = dict[str, Any]
WORDS = ["the", "red", "fox", "sees", "a", "cold", "river", "and", "tells", "the", "old", "bear", "where", "it", "ends"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def draw(rng: random.Random) -> tuple[str, Body]:
    """The path of a request and its body."""
    make = rng.choice((completion, chat, chat))
    body = {**make(rng), **sampling(rng)}
    if rng.random() < 0.1:  # SGLang's engine on a CPU runs no adapters
        body |= rng.choice(({"model": "m"}, {"lora_path": "nobody"}, {"model": "m:nobody"}))
    for name in rng.sample(sorted(body), k=len(body)):
        if rng.random() < 0.02:
            body[name] = rng.choice((None, "7", -1, [], {}, 1e300, 2**31, True))
    # SGLang's server ends of these, and `batch` refuses them.
    if body.get("temperature") == 1e300:
        del body["temperature"]
    if {"regex", "ebnf", "response_format", "json_schema", "tools"} & body.keys():
        body.pop("min_tokens", None)
    return ("/v1/completions" if make is completion else "/v1/chat/completions"), body


def text(rng: random.Random) -> str:
    start = "Once upon a time in a wood, " * rng.randrange(3)
    return start + " ".join(rng.choices(WORDS, k=rng.randrange(1, 12))) + rng.choice(("", " ", "\n", " é漢"))


def completion(rng: random.Random) -> Body:
    tokens = [rng.randrange(10, 300) for _ in range(rng.randrange(1, 20))]
    prompt: Any = rng.choice(
        (text(rng), text(rng), text(rng), tokens, [tokens], [text(rng), text(rng)], [tokens, [11]])
    )
    body: Body = {"prompt": prompt, "max_tokens": rng.randrange(1, 12)}
    return body | some(rng, 0.15, {
        "echo": True, "logprobs": rng.randrange(4), "suffix": "end", "best_of": 2, "json_schema": '{"type": "integer"}',
    })  # fmt: skip


def chat(rng: random.Random) -> Body:
    messages: list[Body] = []
    if rng.random() < 0.4:
        messages.append({"role": rng.choice(("system", "developer")), "content": text(rng)})
    for _ in range(rng.randrange(1, 3)):
        messages.append({"role": "user", "content": content(rng)})
        if rng.random() < 0.3:
            messages.append({"role": "assistant", "content": rng.choice((content(rng), None)), "tool_calls": [CALL]})
            messages.append({"role": "tool", "tool_call_id": "c1", "content": content(rng)})
        elif rng.random() < 0.3:
            messages.append({"role": "assistant", "content": text(rng), "reasoning_content": text(rng)})
        elif rng.random() < 0.3:
            messages.append({"role": "assistant", "tool_calls": [CALL]})
    body: Body = {"messages": messages}
    body |= rng.choice(({"max_tokens": 9}, {"max_completion_tokens": 7}, {"max_tokens": 5, "max_completion_tokens": 6}))
    if rng.random() < 0.25:
        choices = ("auto", "required", "none", {"type": "function", "function": {"name": "look"}})
        body |= {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": rng.choice(choices)}
    return body | some(rng, 0.1, {
        "tools": None, "logprobs": True, "top_logprobs": rng.randrange(3), "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": rng.random() < 0.5}, "reasoning_effort": "low",
        "reasoning": {"effort": "high"}, "separate_reasoning": False, "stream_reasoning": False,
        "parallel_tool_calls": False, "input_ids": [20, 21, 22], "max_tokens": None, "return_prompt_token_ids": True,
    })  # fmt: skip


def content(rng: random.Random) -> Any:
    parts = [{"type": "text", "text": text(rng)} for _ in range(rng.randrange(1, 3))]
    return rng.choice((text(rng), text(rng), parts, ""))


def sampling(rng: random.Random) -> Body:
    # Mostly greedy: only then outputs can be compared.
    temperature: Body = rng.choice(
        ({"temperature": 0}, {"temperature": 0.0}, {"temperature": 0}, {}, {"temperature": 0.7})
    )
    body = temperature | some(rng, 0.12, {
        "top_p": 0.9, "top_k": 5, "min_p": 0.05, "n": rng.randrange(1, 4), "seed": rng.randrange(-5, 2**40),
        "stop": rng.choice(("e", ["e", "x y"])), "stop_token_ids": [40, 41], "stop_regex": "[0-9]+", "min_tokens": 3,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "ignore_eos": True,
        "logit_bias": {"50": 5, "51": -100}, "skip_special_tokens": False, "no_stop_trim": True, "user": "u",
        "cache_salt": "s", "extra_key": "k", "custom_params": {"a": 1}, "return_token_ids": True, "stream": False,
        "return_hidden_states": True, "priority": 1, "metadata": {"a": "b"},
    })  # fmt: skip
    if rng.random() < 0.15:
        body |= rng.choice((
            {"regex": "[a-c]{2,4}"}, {"ebnf": 'root ::= "a" | "b"'}, {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            {"response_format": {"type": "text"}}, {"response_format": {"type": "json_schema"}},
        ))  # fmt: skip
    return body


def some(rng: random.Random, share: float, fields: Body) -> Body:
    return {name: value for name, value in fields.items() if rng.random() < share}
