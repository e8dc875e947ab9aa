//! The name of a model that is measured, as its run has it.
//!
//! A run that only measures has a single model, and a name would say nothing. A run that prunes has a dense and a pruned model, a training
//! has a model before and after.

/// A model that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NamedModel {
    /// The only model of the run.
    #[default]
    Only,
    /// The dense model of a run that prunes, or that compares.
    Dense,
    /// The pruned model of a run that prunes.
    Pruned,
    /// The model that is compared with the dense model.
    Compared,
    /// The model before a training.
    Before,
    /// The model after a training.
    After,
}

impl NamedModel {
    /// Its name alone.
    pub fn name(self) -> &'static str {
        match self {
            Self::Only | Self::Compared => "model",
            Self::Dense => "dense",
            Self::Pruned => "pruned",
            Self::Before => "before",
            Self::After => "after",
        }
    }

    /// The phase in which its windows pass a layer.
    pub fn evaluate(self) -> String {
        match self {
            Self::Only => "evaluate".to_string(),
            _ => format!("evaluate {}", self.name()),
        }
    }

    /// Something that is measured, like its perplexity or its tasks.
    pub fn of(self, what: &str) -> String {
        match self {
            Self::Only => what.to_string(),
            Self::Before | Self::After => format!("{what} {}", self.name()),
            Self::Dense | Self::Pruned | Self::Compared => format!("{} {what}", self.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::NamedModel as Model;

    #[test]
    fn a_model_is_called_dense_or_pruned_only_beside_the_other() {
        assert_eq!(Model::Only.evaluate(), "evaluate");
        assert_eq!(Model::Pruned.evaluate(), "evaluate pruned");
        assert_eq!(Model::Only.of("perplexity"), "perplexity");
        assert_eq!(Model::Dense.of("perplexity"), "dense perplexity");
        assert_eq!(Model::After.of("perplexity"), "perplexity after");
    }
}
