"""A model's config.json from a hub, without its weights: one small request with a short timeout, never retried."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]  # no __all__

from mlxkv.core.errors import ModelError, ModelNotFoundError
from mlxkv.sizing.catalog import suggest
from mlxkv.sizing.config import Config, check_config, parse_config, read_config

_TIMEOUT_S = 5.0
_CONFIG = "config.json"
# The base of every error of the HTTP library that the installed huggingface_hub is built on (httpx, then httpx2).
_TransportError: type[Exception] = HfHubHTTPError.__bases__[0]


def config_from_hub(hub_id: str) -> tuple[Config, str]:
    """The checked config of a hub id, and where it came from: the local hub cache, or the network.

    Raises:
        ModelNotFoundError: the hub does not know the id, or cannot be reached.
        ModelError: what it holds is no config, or may not be read without a login.

    Cost: at most one request; 5 s when nobody answers.
    """
    try:
        cached = try_to_load_from_cache(hub_id, _CONFIG)
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"{hub_id!r} is no hub id, no path and no catalog name; did you mean {_near(hub_id)}?"
        ) from error
    if isinstance(cached, str):
        return read_config(Path(cached)), f"hub {hub_id}, from the local hub cache"
    try:
        response = get_session().get(
            hf_hub_url(hub_id, _CONFIG), headers=build_hf_headers(), timeout=_TIMEOUT_S, follow_redirects=True
        )
        hf_raise_for_status(response)
    except GatedRepoError as error:
        raise ModelError(f"the hub shows {hub_id} only after a login; run `hf auth login` first.") from error
    except HfHubHTTPError as error:
        raise ModelNotFoundError(
            f"the hub has no {_CONFIG} for {hub_id} (status {error.response.status_code});"
            f" check the name. In the catalog: {_near(hub_id)}."
        ) from error
    except (_TransportError, OfflineModeIsEnabled) as error:
        raise ModelNotFoundError(
            f"the hub cannot be reached for {hub_id} ({str(error).splitlines()[0] if str(error) else 'no answer'});"
            f" give a local directory, or a name from the catalog such as {_near(hub_id)}."
        ) from error
    source = f"{_CONFIG} of {hub_id}"
    return check_config(parse_config(response.content, source=source), source=source), f"hub {hub_id}"


def _near(hub_id: str) -> str:
    return ", ".join(suggest(hub_id))
