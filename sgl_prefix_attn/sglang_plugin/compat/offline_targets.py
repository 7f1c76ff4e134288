"""Names of SGLang that only offline batches use; `targets.py` lists the others. Data only."""

from __future__ import annotations

from sgl_prefix_attn.sglang_plugin.compat.targets import Target, Use, attributes_of

_ENGINE = "entrypoints.engine.Engine"
_MANAGER = "managers.tokenizer_manager.TokenizerManager"
_OPENAI = "entrypoints.openai"
_CHAT = f"{_OPENAI}.serving_chat.OpenAIServingChat"
_COMPLETION = f"{_OPENAI}.serving_completions.OpenAIServingCompletion"
_REQUEST = "managers.io_struct.GenerateReqInput"
_CONFIG_EARLY = "server_args_config_parser.ConfigArgumentMerger"
_CONFIG = "utils.server_args_config_parser.ConfigArgumentMerger"

OFFLINE_TARGETS = (
    Target(_ENGINE, Use.CLASS),
    Target(f"{_ENGINE}.get_server_info", Use.CALL),
    Target(f"{_ENGINE}.shutdown", Use.CALL),
    # Overridden: it is called when the schedulers have been started, and makes the tokenizer manager.
    *attributes_of(_ENGINE, "loop tokenizer_manager init_tokenizer_manager_func"),
    Target("entrypoints.engine.init_tokenizer_manager", Use.CALL, ("server_args", "port_args")),
    Target(f"{_MANAGER}.generate_request", Use.CALL, ("obj", "request")),
    Target(f"{_MANAGER}._tokenize_one_request", Use.CALL, ("obj",)),
    *attributes_of(
        _MANAGER, "context_len tokenizer model_config rid_to_state serving_chat_class async_dynamic_batch_tokenizer"
    ),
    # What a request means.
    Target(f"{_OPENAI}.protocol.ChatCompletionRequest", Use.CLASS),
    Target(f"{_OPENAI}.protocol.CompletionRequest", Use.CLASS),
    *attributes_of(f"{_OPENAI}.protocol.ChatCompletionRequest", "stream custom_params max_completion_tokens"),
    *attributes_of(f"{_OPENAI}.protocol.CompletionRequest", "stream custom_params"),
    Target(f"{_COMPLETION}.__init__", Use.CALL, ("tokenizer_manager", "template_manager")),
    Target(f"{_CHAT}.__init__", Use.CALL, ("tokenizer_manager", "template_manager")),
    *(
        target
        for handler in (_CHAT, _COMPLETION)
        for target in (
            Target(f"{handler}._validate_request", Use.CALL, ("request",)),
            Target(f"{handler}._convert_to_internal_request", Use.CALL, ("request", "raw_request")),
        )
    ),
    Target(f"{_OPENAI}.serving_base.OpenAIServingBase.handle_request", Use.CALL, ("request", "raw_request")),
    *attributes_of(f"{_OPENAI}.serving_base.OpenAIServingBase", "tokenizer_manager"),
    Target(f"{_REQUEST}.normalize_batch_and_arguments", Use.CALL),
    Target(f"{_REQUEST}.contains_mm_input", Use.CALL),
    *attributes_of(_REQUEST, "is_single batch_size sampling_params lora_path extra_key"),
    *attributes_of("managers.io_struct.TokenizedGenerateReqInput", "input_ids sampling_params top_logprobs_num"),
    *attributes_of(
        "sampling.sampling_params.SamplingParams",
        "max_new_tokens min_new_tokens ignore_eos n top_k temperature repetition_penalty logit_bias stop_token_ids "
        "sampling_seed",
    ),
    Target("plugins.load_plugins", Use.CALL),
    Target("server_args.prepare_server_args", Use.CALL, ("argv",)),
    Target("server_args.ServerArgs.add_cli_args", Use.CALL, ("parser",)),
    # Token batching: what it asks for, and what schedulers count.
    *attributes_of("server_args.ServerArgs", "enable_mixed_chunk kv_cache_dtype", until="0.5.19"),
    *attributes_of("arg_groups.fields.schedule.Schedule", "enable_mixed_chunk", since="0.5.20"),
    *attributes_of("arg_groups.fields.model.Model", "kv_cache_dtype", since="0.5.20"),
    *attributes_of("managers.scheduler.Scheduler", "chunked_prefill_size is_mixed_chunk"),
    *attributes_of("managers.schedule_batch.ScheduleBatch", "extend_num_tokens forward_mode"),
    Target("managers.schedule_batch.ScheduleBatch.batch_size", Use.CALL),
    Target("model_executor.forward_batch_info.ForwardMode.is_extend", Use.CALL),
    Target("model_executor.forward_batch_info.ForwardMode.is_target_verify", Use.CALL),
    # The file of --config.
    Target(f"{_CONFIG_EARLY}.__init__", Use.CALL, ("parser",), until="0.5.18"),
    Target(f"{_CONFIG_EARLY}.merge_config_with_args", Use.CALL, ("cli_args",), until="0.5.18"),
    Target(f"{_CONFIG}.__init__", Use.CALL, ("parser",), since="0.5.19"),
    Target(f"{_CONFIG}.merge_config_with_args", Use.CALL, ("cli_args",), since="0.5.19"),
)
