"""The OpenAI routes of the table in `routes`."""

from __future__ import annotations

from zerogap.wire.openai_messages import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from zerogap.wire.route import GET, POST, Route

OPENAI_ROUTES: tuple[Route, ...] = (
    Route(
        name="chat_completions",
        path="/v1/chat/completions",
        methods=(POST,),
        reply="OpenAI's chat completion, with `metadata: {weight_version, weight_versions}`; `stream`: chunks, then "
        "`[DONE]`",
        body=ChatBody,
        body_required=True,
        ours="Unset sampling fields are 1.0, 1.0 and -1 as at `/generate`; SGLang takes them from the model's "
        "generation_config.json. `seed` is always honoured. Any `model` is accepted, the reply says which one served. "
        "Tools, response formats, images and adapters are refused by name. A stream never shows the beginning of a "
        "stop string. `logprob` -9999.0 stands for no probability. `bytes` is null for a piece of a character. With "
        "`input_ids` the messages are not read. What `return_*` asks for is in each choice.",
    ),
    Route(
        name="completions",
        path="/v1/completions",
        methods=(POST,),
        reply="OpenAI's text completion; a choice per prompt and sample",
        body=CompletionBody,
        body_required=True,
        ours="As for chat. `echo` with `logprobs` scores the prompt, also with `max_tokens: 0`; its first token has "
        "none. `text_offset` counts characters of the text, so a token that the text does not show "
        "has the place of the next one. Tokens of one text share an entry of `top_logprobs`: the likeliest one's.",
    ),
    Route(
        name="models",
        path="/v1/models",
        methods=(GET,),
        reply="`{object: list, data: [{id, max_model_len, ...}]}`",
        idempotent=True,
    ),
    Route(
        name="model",
        path="/v1/models/{model_id}",
        methods=(GET,),
        reply="`{id, object, created, owned_by, max_model_len}`; 404 for another name",
        idempotent=True,
    ),
    Route(
        name="tokenize",
        path="/v1/tokenize",
        methods=(POST,),
        reply="`{tokens, count, max_model_len}`",
        body=TokenizeBody,
        body_required=True,
        idempotent=True,
        aliases=("/tokenize",),
    ),
    Route(
        name="detokenize",
        path="/v1/detokenize",
        methods=(POST,),
        reply="`{text}`",
        body=DetokenizeBody,
        body_required=True,
        idempotent=True,
        aliases=("/detokenize",),
    ),
)
