"""Content-addressed folders under the data directory."""
class BlobStore:
    def __init__(self, data_dir: Path) -> None:
        """blobs in data_dir/blobs/<hex>, uploads in data_dir/staging/<random>."""
    def staging(self) -> AbstractContextManager[Path]:
        """An empty folder for one upload, on the store's file system; gone at the end (what was moved into the store stays)."""
    def path(self, digest: str) -> Path: ...
