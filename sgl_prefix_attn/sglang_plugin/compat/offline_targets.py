"""Names of SGLang that only offline batches use; `targets.py` lists the others. Data only."""

from __future__ import annotations

from sgl_prefix_attn.sglang_plugin.compat.targets import Target, Use, attributes_of

_ENGINE = "entrypoints.engine.Engine"
_CONFIG_EARLY = "server_args_config_parser.ConfigArgumentMerger"
_CONFIG = "utils.server_args_config_parser.ConfigArgumentMerger"

OFFLINE_TARGETS = (
    Target(_ENGINE, Use.CLASS),
    Target(f"{_ENGINE}.async_generate", Use.CALL, ("prompt", "sampling_params", "input_ids")),
    Target(f"{_ENGINE}.get_server_info", Use.CALL),
    Target(f"{_ENGINE}.shutdown", Use.CALL),
    *attributes_of(_ENGINE, "loop tokenizer_manager"),
    *attributes_of("managers.tokenizer_manager.TokenizerManager", "context_len"),
    Target("plugins.load_plugins", Use.CALL),
    Target("server_args.prepare_server_args", Use.CALL, ("argv",)),
    # The file of --config.
    Target("server_args.ServerArgs.add_cli_args", Use.CALL, ("parser",)),
    Target(f"{_CONFIG_EARLY}.__init__", Use.CALL, ("parser",), until="0.5.18"),
    Target(f"{_CONFIG_EARLY}.merge_config_with_args", Use.CALL, ("cli_args",), until="0.5.18"),
    Target(f"{_CONFIG}.__init__", Use.CALL, ("parser",), since="0.5.19"),
    Target(f"{_CONFIG}.merge_config_with_args", Use.CALL, ("cli_args",), since="0.5.19"),
)
