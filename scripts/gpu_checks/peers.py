"""transformers on the same GPU: a model of the same shape in bfloat16, beside our figures.

Its weights take about four times the bytes of ours. Its steps are not waited for one by one, which
is in its favour: its next token does not pass through the host.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from gpu_checks.check import Check, Json
from gpu_checks.speed import Plan
from gpu_checks.timing import seconds


def run(check: Check) -> None:
    try:
        import transformers
    except ImportError as error:
        check.put("transformers", None)
        check.put("why", f"not measured, for it cannot be imported: {error}")
        return
    check.put("transformers", transformers.__version__)
    plan = Plan(check.rehearsal)
    model = _model(transformers, plan, check)
    check.put("attention", str(model.config._attn_implementation))
    for batch in plan.batches:
        name = f"decode, batch {batch}"
        check.put(name, _beside(check, name, _decoding(check, plan, model, batch)))
    name = f"prefill, {plan.prefill} tokens"
    check.put(name, _beside(check, name, _prefill(check, plan, model)))


def _model(transformers: Any, plan: Plan, check: Check) -> Any:
    """With random weights, made on the device."""
    shape = plan.shape
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=plan.limits.context,
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(check.device):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(usual)


def _decoding(check: Check, plan: Plan, model: Any, batch: int) -> float:
    """Tokens per second of all sequences together, at the depths at which ours were measured."""
    ids = torch.randint(plan.shape.vocab, (batch, plan.prompt), device=check.device)
    with torch.inference_mode():
        out = model(ids, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        known = inspect.signature(model.forward).parameters  # the name has changed
        cache = {"cache" if "cache" in known else "past_key_values": out.past_key_values}

        def step() -> None:
            nonlocal token
            answer = model(token, logits_to_keep=1, **cache)
            token = answer.logits[:, -1:].argmax(-1)

        for _ in range(plan.warm - 1):  # and once more before the clock starts
            step()
        each = seconds(step, check.device, calls=plan.timed, tries=1)
    return batch / each


def _prefill(check: Check, plan: Plan, model: Any) -> float:
    ids = torch.randint(plan.shape.vocab, (1, plan.prefill), device=check.device)
    with torch.inference_mode():
        each = seconds(
            lambda: model(ids, use_cache=True, logits_to_keep=1),
            check.device,
            calls=1,
            tries=plan.tries,
        )
    return plan.prefill / each


def _beside(check: Check, name: str, theirs: float) -> Json:
    """Tokens per second of both, from one run of the check."""
    figures = check.found_by("speed").get(name)
    ours = figures.get("tokens per second") if isinstance(figures, dict) else None
    return {"transformers, tokens/s": check.measured(theirs), "localllm, tokens/s": ours}
