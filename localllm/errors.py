"""Every error that localllm raises on purpose. Messages are one line and name what is wrong."""


class LocalLLMError(Exception):
    """Base of all errors that a user can cause or has to know about."""


class ModelError(LocalLLMError):
    """The model file is at fault, or asks for something this version cannot do."""


class GGUFError(ModelError):
    """The file is not a well-formed GGUF file; the message names the key or tensor."""


class UnsupportedArchitectureError(ModelError):
    """No model in the registry has the file's `general.architecture`."""


class TokenizerError(ModelError):
    """The vocabulary in the file is broken or of a kind that is not known."""


class ChatTemplateError(ModelError):
    """The chat template in the file cannot be parsed."""


class InsufficientMemoryError(ModelError):
    """The model and the smallest useful KV pool do not fit; the message gives the numbers."""


class DeviceOutOfMemoryError(LocalLLMError):
    """A step found too little memory on its device; a smaller one may fit. Raised by a backend's
    `submit` and `collect`, of which nothing is left but KV entries that nobody counts on."""


class RequestError(LocalLLMError):
    """A request is invalid: the caller's fault, HTTP 400.

    `param` names the offending field, `code` is the OpenAI error code where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Prompt (plus the least output) does not fit the context window.

    `counted_all`: `prompt_tokens` are all that the prompt has, not only the first of them.
    """

    def __init__(
        self,
        prompt_tokens: int,
        context: int,
        *,
        param: str = "messages",
        counted_all: bool = True,
    ) -> None:
        count = f"{prompt_tokens}" if counted_all else f"over {context}"
        super().__init__(
            # Clients know this error by these words: "prompt is too long", "exceeds the context
            # window".
            f"This prompt is too long: with {count} tokens it exceeds the context window "
            f"of {context} tokens",
            param=param,
            code="context_length_exceeded",
        )


class TemplateRenderError(RequestError):
    """The chat template refused the messages; the message quotes the template's own."""


class EngineError(LocalLLMError):
    """The engine process failed or is gone; requests in flight end with this."""


class DownloadError(LocalLLMError):
    """A model could not be fetched; the message says from where and why."""
