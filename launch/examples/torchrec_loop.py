"""Plans a TorchRec model's tables and moves them: `torchrun --nproc_per_node=2 launch/examples/torchrec_loop.py`."""

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

import dlrm_autoshard as das

FEATURES, BATCH, STEPS = [f"feature_{i}" for i in range(4)], 64, 101


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"of_{name}", num_embeddings=1000, embedding_dim=8, feature_names=[name])
            for name in FEATURES
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.tower = torch.nn.Linear(8 * len(FEATURES), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.tower(self.ebc(features).values()).squeeze(1)


def made_up_ids() -> KeyedJaggedTensor:
    count = len(FEATURES) * BATCH
    return KeyedJaggedTensor(FEATURES, torch.randint(1000, (count,)), lengths=torch.ones(count).int())


def main() -> None:
    dist.init_process_group("gloo")
    module = Model()
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    plan = das.torchrec.plan(module, made_up_ids(), optimizer="rowwise_adagrad")  # by measurements on these ranks
    model = DistributedModelParallel(module, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    weights = [parameter for name, parameter in model.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.SGD(weights, lr=0.02)
    autoshard = das.torchrec.Autoshard(model, optimizer, every_steps=50, run_dir="runs/torchrec_loop")
    for _ in range(STEPS):
        optimizer.zero_grad()
        labels_B = torch.randint(2, (BATCH,)).float()
        torch.nn.functional.binary_cross_entropy_with_logits(model(made_up_ids()), labels_B).backward()
        optimizer.step()
        autoshard.step()
    autoshard.finish()  # runs/torchrec_loop/report.html
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
