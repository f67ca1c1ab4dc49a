"""Feature columns: transform raw features into the inputs of a model.

(TF: `tf.feature_column`.) A JAX program cannot hold strings, so a column has two
halves: `features_of` converts a batch to numbers on the host, and the layers transform
the numbers in the program. The hash is not TF's, so bucket numbers differ.
"""

from replicax_estimator.feature_column.categorical import (
    categorical_column_with_identity,
    categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list,
    weighted_categorical_column,
)
from replicax_estimator.feature_column.column import (
    CategoricalColumn,
    Column,
    DenseColumn,
    features_of,
)
from replicax_estimator.feature_column.dense import (
    embedding_column,
    indicator_column,
    shared_embeddings,
)
from replicax_estimator.feature_column.hashing import (
    categorical_column_with_hash_bucket,
    crossed_column,
)
from replicax_estimator.feature_column.layers import (
    DenseFeatures,
    LinearModel,
    input_layer,
    linear_model,
)
from replicax_estimator.feature_column.numeric import bucketized_column, numeric_column

__all__ = [
    "CategoricalColumn",
    "Column",
    "DenseColumn",
    "DenseFeatures",
    "LinearModel",
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "crossed_column",
    "embedding_column",
    "features_of",
    "indicator_column",
    "input_layer",
    "linear_model",
    "numeric_column",
    "shared_embeddings",
    "weighted_categorical_column",
]
