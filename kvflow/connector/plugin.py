"""The `vllm.general_plugins` entry point. vLLM calls it in every process, early: it must be light and never raise."""

import logging

NAME = "KvflowConnector"


def register() -> None:
    """Make the connector known to vLLM under its name; calling it again does nothing."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(NAME, "kvflow.connector.facade", NAME)
    except ValueError:
        return  # registered already
    except Exception as error:  # noqa: BLE001 - a plugin that raises would take down engines that do not use it
        logging.getLogger("kvflow").warning(
            "%s was not registered with vLLM (%s); name it by kv_connector_module_path instead", NAME, error
        )
