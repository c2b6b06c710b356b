"""Evaluation of encoders: protocols with labels, and measures of collapse without labels.

Names are imported when they are used first, because the results of runs are read without torch.
"""

from fedssl.lazy import lazy_names

_MODULES = {
    "collapse_metrics": ("CollapseMetrics", "alignment", "covariance_rank", "effective_rank", "uniformity"),
    "features": ("Features", "accuracy", "extract", "pixel_values"),
    "few_labels": ("FewLabels",),
    "fine_tune": ("FineTune",),
    "knn": ("KNN", "knn_predict"),
    "labeled_images": ("LabeledImages",),
    "linear_probe": ("LinearProbe", "softmax_regression", "standardize"),
    "multi_label": ("MultiLabel",),
    "protocol": ("CombinedProtocol", "EvaluationInput", "EvaluationProtocol", "evaluate"),
    "regression": ("Regression",),
    "retrieval": ("Retrieval",),
    "scores": ("Score",),
    "segmentation": ("Segmentation",),
    "sgd_linear_probe": ("SGDLinearProbe",),
    "transfer": ("Transfer",),
}
__all__, __getattr__, __dir__ = lazy_names(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
