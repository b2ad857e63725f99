"""From (tenant, `model`) to a combination."""
DEFAULT_ALIAS = "prod"
class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """combination, adapter: for GenerationRequest. label: `<adapter>@<number>` or `<base>`. adapter_name, revision: None for the base. tokenizer_folder, template_folder: where to load each from."""
    combination: Combination
    adapter: AdapterSource | None
    label: str
    base_name: str
    adapter_name: str | None
    revision: int | None
    route_version: int
    tokenizer_folder: str
    template_folder: str
def resolve(snapshot: RouteSnapshot, tenant: str, model: str) -> Resolution:
    """Raises ModelNotFound, NoDefaultRevision, RevisionRetired."""
