{{- define "dra-driver-shared.labels" -}}
app.kubernetes.io/name: dra-driver-shared
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "dra-driver-shared.pluginSelector" -}}
app.kubernetes.io/name: dra-driver-shared
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: plugin
{{- end -}}
