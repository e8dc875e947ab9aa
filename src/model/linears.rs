//! The linears of a decoder layer and the inputs they share.
//!
//! A linear is a stored matrix. Most hold the rows of one [`LinearRole`]; a fused matrix holds the rows of several roles, one after the
//! other. A family's record (`family`) lists the linears of its layers; their shapes follow from the roles and the configuration.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Index, IndexMut};

use serde::{Serialize, Serializer};

/// Purpose of the rows of a matrix. The order of the variants is the order in which the reference prunes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names are those of the tensors")]
pub enum LinearRole {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
}

impl LinearRole {
    /// The input that the rows are multiplied with.
    pub fn input(self) -> InputId {
        match self {
            Self::Q | Self::K | Self::V => InputId::Attention,
            Self::O => InputId::O,
            Self::Gate | Self::Up => InputId::Mlp,
            Self::Down => InputId::Down,
        }
    }
}

/// The name of a linear inside its layer, and the roles of its rows.
struct LinearNames {
    name: &'static str,
    roles: &'static [LinearRole],
}

/// A linear of a decoder layer. Linears of a layer are ordered as the reference prunes them.
#[derive(Clone, Copy)]
pub struct LinearId(&'static LinearNames);

impl LinearId {
    /// `q_proj`
    pub const Q: Self = Self(&LinearNames { name: "self_attn.q_proj", roles: &[LinearRole::Q] });
    /// `k_proj`
    pub const K: Self = Self(&LinearNames { name: "self_attn.k_proj", roles: &[LinearRole::K] });
    /// `v_proj`
    pub const V: Self = Self(&LinearNames { name: "self_attn.v_proj", roles: &[LinearRole::V] });
    /// `qkv_proj`: the rows of q, k and v in a matrix
    pub const QKV: Self = Self(&LinearNames {
        name: "self_attn.qkv_proj",
        roles: &[LinearRole::Q, LinearRole::K, LinearRole::V],
    });
    /// `o_proj`
    pub const O: Self = Self(&LinearNames { name: "self_attn.o_proj", roles: &[LinearRole::O] });
    /// `gate_proj`
    pub const GATE: Self = Self(&LinearNames { name: "mlp.gate_proj", roles: &[LinearRole::Gate] });
    /// `up_proj`
    pub const UP: Self = Self(&LinearNames { name: "mlp.up_proj", roles: &[LinearRole::Up] });
    /// `gate_up_proj`: the rows of gate and up in a matrix
    pub const GATE_UP: Self =
        Self(&LinearNames { name: "mlp.gate_up_proj", roles: &[LinearRole::Gate, LinearRole::Up] });
    /// `down_proj`
    pub const DOWN: Self = Self(&LinearNames { name: "mlp.down_proj", roles: &[LinearRole::Down] });

    /// The linear that holds the rows of this role alone.
    pub const fn alone(role: LinearRole) -> Self {
        match role {
            LinearRole::Q => Self::Q,
            LinearRole::K => Self::K,
            LinearRole::V => Self::V,
            LinearRole::O => Self::O,
            LinearRole::Gate => Self::GATE,
            LinearRole::Up => Self::UP,
            LinearRole::Down => Self::DOWN,
        }
    }

    /// The name inside the layer: `self_attn.q_proj`.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// The name of the module alone: `q_proj`.
    pub fn module(self) -> &'static str {
        let name = self.name();
        name.rsplit_once('.').map_or(name, |(_, module)| module)
    }

    /// The module's full name: `model.layers.3.self_attn.q_proj`.
    pub fn full_name(self, layer: usize) -> String {
        format!("model.layers.{layer}.{}", self.name())
    }

    /// The name of its weight's tensor: `model.layers.3.self_attn.q_proj.weight`.
    pub fn tensor_name(self, layer: usize) -> String {
        format!("{}.weight", self.full_name(layer))
    }

    /// The name of its bias' tensor: `model.layers.3.self_attn.q_proj.bias`.
    pub fn bias_name(self, layer: usize) -> String {
        format!("{}.bias", self.full_name(layer))
    }

    /// The roles of its rows, in the order of the rows.
    pub fn roles(self) -> &'static [LinearRole] {
        self.0.roles
    }

    /// Returns true for a linear of the attention block, false for a linear of the MLP.
    pub fn is_attention(self) -> bool {
        matches!(self.input(), InputId::Attention | InputId::O)
    }

    /// Its input. Linears with the same input share it.
    pub fn input(self) -> InputId {
        self.roles()[0].input()
    }
}

impl fmt::Debug for LinearId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.module())
    }
}

impl PartialEq for LinearId {
    fn eq(&self, other: &Self) -> bool {
        self.roles() == other.roles()
    }
}

impl Eq for LinearId {}

impl Hash for LinearId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.roles().hash(state);
    }
}

impl PartialOrd for LinearId {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for LinearId {
    fn cmp(&self, other: &Self) -> Ordering {
        self.roles().cmp(other.roles())
    }
}

impl Serialize for LinearId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.module())
    }
}

/// An input of a layer's linears.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InputId {
    /// The hidden states that enter attention, after a norm if the family has one: input of q, k and v.
    Attention,
    /// The attention's context: input of o.
    O,
    /// The hidden states that enter the MLP, after a norm if the family has one: input of gate and up.
    Mlp,
    /// activation(gate)·up: input of down.
    Down,
}

impl InputId {
    /// All inputs, in the order a layer passes them.
    pub const ALL: [Self; 4] = [Self::Attention, Self::O, Self::Mlp, Self::Down];
}

/// A value for every input of a layer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct InputMap<T>([T; InputId::ALL.len()]);

impl<T> InputMap<T> {
    /// Computes the values in the order of [`InputId::ALL`].
    pub fn new(value: impl FnMut(InputId) -> T) -> Self {
        Self(InputId::ALL.map(value))
    }

    /// The values in the order of [`InputId::ALL`].
    pub fn values(&self) -> impl ExactSizeIterator<Item = &T> {
        self.0.iter()
    }

    /// The inputs with their values.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (InputId, &T)> {
        InputId::ALL.into_iter().zip(&self.0)
    }

    /// The inputs with their values, for changes.
    pub fn iter_mut(&mut self) -> impl ExactSizeIterator<Item = (InputId, &mut T)> {
        InputId::ALL.into_iter().zip(&mut self.0)
    }

    /// Computes a value from every value.
    pub fn map<U>(self, mut value: impl FnMut(InputId, T) -> U) -> InputMap<U> {
        let mut inputs = InputId::ALL.into_iter();
        InputMap(self.0.map(|one| value(inputs.next().unwrap_or(InputId::Down), one)))
    }
}

impl<T> IntoIterator for InputMap<T> {
    type Item = (InputId, T);
    type IntoIter = std::iter::Zip<
        std::array::IntoIter<InputId, { InputId::ALL.len() }>,
        std::array::IntoIter<T, { InputId::ALL.len() }>,
    >;

    fn into_iter(self) -> Self::IntoIter {
        InputId::ALL.into_iter().zip(self.0)
    }
}

impl<T> Index<InputId> for InputMap<T> {
    type Output = T;

    fn index(&self, input: InputId) -> &T {
        &self.0[input as usize]
    }
}

impl<T> IndexMut<InputId> for InputMap<T> {
    fn index_mut(&mut self, input: InputId) -> &mut T {
        &mut self.0[input as usize]
    }
}
