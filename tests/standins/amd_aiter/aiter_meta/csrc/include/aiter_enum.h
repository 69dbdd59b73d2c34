#pragma once

enum class ActivationType : int { No = -1, Silu = 0, Gelu };
enum class QuantType : int { No, per_Tensor, per_Token };
