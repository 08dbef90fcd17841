"""Named, repeatable measurements: `dlrm-autoshard bench` lists them. Records of their figures are in results/."""
