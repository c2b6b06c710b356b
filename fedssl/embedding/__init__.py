"""Features of images by a trained encoder, for files, pages and other programs.

embedder = load_embedder("runs/my-run")
embeddings = embed_path(embedder, "photos")
embeddings.features[embeddings.names.index("cat/1.png")]
"""

from fedssl.embedding.embedder import Embedder, load_embedder
from fedssl.embedding.embeddings import Embeddings, embed_path

__all__ = ["Embedder", "Embeddings", "embed_path", "load_embedder"]
