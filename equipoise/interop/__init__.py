"""Names of torch, Lightning, torchmetrics and Ray that are private, each with the reason why nothing public does."""
