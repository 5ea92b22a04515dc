"""What a record says: the states, and the forms that their payloads have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from making_corpus.parts import (
    Case,
    as_text,
    between,
    downloading,
    loading,
    malformed,
    ready,
    sleeping,
    unknown,
)

RULES: Final = {
    "payload.loading": "The payload of `loading` has two shapes, `{stages, current, value}` and"
    " `{stage}`, and everything in both is optional.",
    "payload.ready": "The payload of `ready` is kept if it is an object with members, and is null"
    " after sleep.",
    "payload.sleeping": "The payload of `sleeping` says nothing, whatever it is.",
    "payload.downloading": "The payload of `downloading` has `url`, `downloaded`, `total` and, in"
    " the last one, `result`; everything in it is optional.",
    "payload.null": "A field that is null is one that is not there, and a payload that is no object"
    " has no fields.",
    "payload.types": "A known field of another type makes the line malformed: nothing is"
    " converted.",
    "state.unknown": "A state that nobody knows is told and changes nothing.",
}

MODALITIES: Final = {"input_modalities": ["text"], "output_modalities": ["text"]}
INFO: Final[dict[str, object]] = {
    "id": "model.gguf",
    "meta": {"n_ctx": 4096, "n_params": 135_000_000, "size": 271_000_000, "vocab_type": 2},
    "architecture": MODALITIES,
    "aliases": [],
}
NO_OBJECTS: Final = {
    "null": "null",
    "true": "true",
    "false": "false",
    "zero": "0",
    "a number": "7.5",
    "an empty string": '""',
    "a string": '"text_model"',
    "an empty array": "[]",
    "an array": '[{"stage":"text_model"}]',
}


def cases() -> Iterator[Case]:
    yield from loadings()
    yield from readies()
    yield from sleepings()
    yield from downloadings()
    yield from nulls()
    yield from types()
    yield from states()


def document(state: str, payload: str) -> str:
    return f'{{"state":"{state}","payload":{payload}}}'


def loadings() -> Iterator[Case]:
    rule = "payload.loading"
    both = ["text_model", "mmproj"]
    for name, payload, line in [
        ("progress", {"stages": both, "current": "mmproj", "value": 0.25},
         {"stage": "mmproj", "stages": both, "value": 0.25}),
        ("the beginning", {"stages": ["text_model"], "current": "text_model", "value": 0.0},
         {"stage": "text_model", "stages": ["text_model"], "value": 0.0}),
        ("the end", {"stages": ["text_model"], "current": "text_model", "value": 1.0},
         {"stage": "text_model", "stages": ["text_model"], "value": 1.0}),
        ("between two stages", {"stage": "mmproj"}, {"stage": "mmproj"}),
        ("both shapes at once", {"stage": "a", "current": "b", "value": 0.5},
         {"stage": "b", "value": 0.5}),
        ("nothing", {}, {}),
        ("a value alone", {"value": 0.5}, {"value": 0.5}),
        ("a value that is whole", {"value": 1}, {"value": 1}),
        ("a current alone", {"current": "text_model"}, {"stage": "text_model"}),
        ("stages alone", {"stages": both}, {"stages": both}),
        ("no stages", {"stages": []}, {}),
        ("one stage many times", {"stages": ["a"] * 50}, {"stages": ["a"] * 50}),
        ("a stage without a name", {"stage": ""}, {"stage": ""}),
        ("a stage that nobody knows", {"stage": "\u00e9tape \U0001f999"},
         {"stage": "\u00e9tape \U0001f999"}),
        ("more fields", {"stage": "a", "eta": 4, "tensors": [1, {"b": 2}]}, {"stage": "a"}),
        ("more fields of the other states", {"stage": "a", "url": 7, "id": []}, {"stage": "a"}),
        ("a value above one", {"value": 1.5}, {"value": 1.5}),
        ("a value below zero", {"value": -0.5}, {"value": -0.5}),
    ]:  # fmt: skip
        text = document("loading", as_text(payload))
        yield between(rule, name, loading(text, **line))  # type: ignore[arg-type]
    yield between(rule, "no payload", loading('{"state":"loading"}'))
    steps = [n / 20 for n in range(21)]
    lines = [
        loading(document("loading", as_text({"stages": ["a"], "current": "a", "value": step})),
                stage="a", stages=["a"], value=step)
        for step in steps
    ]  # fmt: skip
    yield between(rule, "a whole load", *lines)


def readies() -> Iterator[Case]:
    rule = "payload.ready"
    yield between(rule, "what a child tells", ready(document("ready", as_text(INFO)), INFO))
    yield between(rule, "null, as after sleep", ready(document("ready", "null"), None))
    yield between(rule, "an object without members", ready(document("ready", "{}"), None))
    yield between(rule, "no payload", ready('{"state":"ready"}', None))
    yield between(rule, "a member that is null", ready(document("ready", '{"id":null}'),
                                                       {"id": None}))  # fmt: skip
    long = {"id": "m", "text": "\u00e9" * 500}
    yield between(rule, "a long one", ready(document("ready", as_text(long)), long))
    many = {f"key{n}": n for n in range(100)}
    yield between(rule, "many members", ready(document("ready", as_text(many)), many))
    nested = {"meta": {"a": {"b": {"c": [1, [2, [3, {"d": None}]]]}}}}
    yield between(rule, "nested", ready(document("ready", as_text(nested)), nested))
    forged = {"id": 'x","state":"sleeping'}
    yield between(rule, "a name that looks like a state", ready(
        document("ready", as_text(forged)), forged
    ))  # fmt: skip


def sleepings() -> Iterator[Case]:
    for name, payload in {**NO_OBJECTS, "an empty object": "{}", "an object": '{"any":1}'}.items():
        yield between("payload.sleeping", name, sleeping(document("sleeping", payload)))
    yield between("payload.sleeping", "fields of the other states", sleeping(
        document("sleeping", '{"value":"x","stages":7,"downloaded":"y"}')
    ))  # fmt: skip


def downloadings() -> Iterator[Case]:
    rule = "payload.downloading"
    url = "https://example.org/m.gguf"
    for name, payload, line in [
        ("progress", {"url": url, "downloaded": 5, "total": 10},
         {"url": url, "downloaded": 5, "total": 10}),
        ("the beginning", {"url": url, "downloaded": 0, "total": 0}, {"url": url}),
        ("an unknown total", {"url": url, "downloaded": 5}, {"url": url, "downloaded": 5}),
        ("finished", {"result": "download_finished"}, {"result": "download_finished"}),
        ("failed", {"url": url, "result": "download_failed"},
         {"url": url, "result": "download_failed"}),
        ("a result that nobody knows", {"result": "download_paused"},
         {"result": "download_paused"}),
        ("nothing", {}, {}),
        ("more than there is", {"url": url, "downloaded": 20, "total": 10},
         {"url": url, "downloaded": 20, "total": 10}),
        ("more fields", {"url": url, "speed": 1.5}, {"url": url}),
        ("a url without a text", {"url": ""}, {"url": ""}),
    ]:  # fmt: skip
        text = document("downloading", as_text(payload))
        yield between(rule, name, downloading(text, **line))  # type: ignore[arg-type]
    yield between(rule, "no payload", downloading('{"state":"downloading"}'))


def nulls() -> Iterator[Case]:
    rule = "payload.null"
    for name, payload in NO_OBJECTS.items():
        yield between(rule, f"loading, {name}", loading(document("loading", payload)))
        yield between(rule, f"ready, {name}", ready(document("ready", payload), None))
        yield between(rule, f"downloading, {name}", downloading(document("downloading", payload)))
    for field in ("stage", "current", "stages", "value"):
        payload = f'{{"{field}":null}}'
        yield between(rule, f"{field} is null", loading(document("loading", payload)))
    for field in ("url", "downloaded", "total", "result"):
        payload = f'{{"{field}":null}}'
        yield between(rule, f"{field} is null", downloading(document("downloading", payload)))
    yield between(rule, "current is null and stage is not", loading(
        document("loading", '{"current":null,"stage":"a"}'), stage="a"
    ))  # fmt: skip


def types() -> Iterator[Case]:
    rule = "payload.types"
    wrong = {
        "a text": '"0.5"',
        "an empty text": '""',
        "a number": "7",
        "a fraction": "0.5",
        "true": "true",
        "false": "false",
        "an array": "[]",
        "an array of texts": '["a"]',
        "an object": "{}",
    }
    fields: dict[str, tuple[str, set[str]]] = {
        "stage": ("loading", {"a text", "an empty text"}),
        "current": ("loading", {"a text", "an empty text"}),
        "stages": ("loading", {"an array", "an array of texts"}),
        "value": ("loading", {"a number", "a fraction"}),
        "url": ("downloading", {"a text", "an empty text"}),
        "downloaded": ("downloading", {"a number"}),
        "total": ("downloading", {"a number"}),
        "result": ("downloading", {"a text", "an empty text"}),
    }
    for field, (state, right) in fields.items():
        for name, value in wrong.items():
            if name not in right:
                text = document(state, f'{{"{field}":{value}}}')
                yield between(rule, f"{field}, {name}", malformed(text))
    for name, value in {
        "a number": "[7]",
        "null": "[null]",
        "a number after texts": '["a","b",7]',
        "an array": '[["a"]]',
    }.items():
        yield between(rule, f"{name} in stages", malformed(
            document("loading", f'{{"stages":{value}}}')
        ))  # fmt: skip
    yield between(rule, "one wrong field among right ones", malformed(
        document("loading", '{"stages":["a"],"current":"a","value":"0.5"}')
    ))  # fmt: skip


def states() -> Iterator[Case]:
    rule = "state.unknown"
    for state in (
        "", "dreaming", "Ready", "READY", "ready ", " ready", "loaded", "unloaded", "error", "exit",
        "downloaded", "stopped", "0", "null", "pr\u00eat", "r\u0435ady", "\uff52eady", "ready/1",
        "loading,ready", "x" * 500,
    ):  # fmt: skip
        name = ascii(state[:20])
        text = document(state, "null")
        yield between(rule, name.replace("/", "|"), unknown(text, state))
    payload = {"of": "sheep", "n": [1, 2.5, None, True]}
    yield between(rule, "with a payload", unknown(
        document("dreaming", as_text(payload)), "dreaming", payload
    ))  # fmt: skip
    yield between(rule, "with a list", unknown(document("dreaming", "[1,2]"), "dreaming", [1, 2]))
    yield between(rule, "without a payload", unknown('{"state":"dreaming"}', "dreaming"))
    yield between(rule, "with fields of the wrong type", unknown(
        document("loaded", '{"value":"x"}'), "loaded", {"value": "x"}
    ))  # fmt: skip
