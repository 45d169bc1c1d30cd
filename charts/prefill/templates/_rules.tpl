{{/* What the operator may do: the same lists as operator/prefill_operator/rbac.py (a test compares them). */}}

{{/* In every namespace with pools. */}}
{{- define "prefill.poolRules" -}}
- apiGroups: [prefill.dev]
  resources: [prefillpools, vepools]
  verbs: [get, list, watch, patch]
- apiGroups: [prefill.dev]
  resources: [prefillpools/status, vepools/status]
  verbs: [patch]
# For blockOwnerDeletion, where the admission plugin OwnerReferencesPermissionEnforcement is on.
- apiGroups: [prefill.dev]
  resources: [prefillpools/finalizers, vepools/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- if .Values.rbac.autoscaling }}
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .Values.rbac.keda }}
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .Values.rbac.prometheusOperator }}
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .Values.rbac.networkPolicies }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- end }}

{{/* Cluster-wide, in both modes. */}}
{{- define "prefill.nodeRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list, watch]
{{- end }}

{{/* In the release's namespace. */}}
{{- define "prefill.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, update]
{{- end }}
